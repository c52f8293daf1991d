"""The legs of ``hetero-kv-proxy`` in vLLM's own hands.

The proxy runs between scripted engines; what reaches them goes through the scheduler sides of
vLLM's connectors, which also make the prefill answers. Nothing here reads our own idea of a body: a
leg is right when both sides of vLLM's connector mean the same blocks, rank and ports by it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import (
    MooncakeBootstrapServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_scheduler
from vllm.v1.request import RequestStatus

from hetero_kv.demo.witness import executable

# vLLM imports a package that its wheel does not ask for; msgspec's codec speaks the same bytes.
if "msgpack" not in sys.modules:
    msgpack = ModuleType("msgpack")
    msgpack.dumps = msgspec.msgpack.encode  # type: ignore[attr-defined]
    msgpack.loads = msgspec.msgpack.decode  # type: ignore[attr-defined]
    sys.modules["msgpack"] = msgpack

from vllm.distributed.kv_transfer.kv_connector.v1.moriio import (
    moriio_common,
    moriio_connector,
)

HOST = "127.0.0.1"
BLOCKS = [[3, 5, 7]]
PROMPT = {"model": "m", "prompt": "hello", "max_tokens": 4}
WAIT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Leg:
    """What reached an engine."""

    request_id: str
    rank: int | None
    body: dict[str, Any]

    @property
    def params(self) -> dict[str, Any]:
        params = self.body["kv_transfer_params"]
        assert isinstance(params, dict)
        return params

    def request(self, status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED) -> Any:
        """The request as vLLM's scheduler has it, under the id that its API server makes."""
        return SimpleNamespace(
            request_id=f"cmpl-{self.request_id}-0-1a2b3c4d",
            kv_transfer_params=self.params,
            status=status,
            num_computed_tokens=3,
        )


class Engine:
    """An HTTP server that shows each leg to `answer`, whose result it answers with."""

    def __init__(self, answer: Callable[[Leg], dict[str, Any]]) -> None:
        self.errors: queue.Queue[BaseException] = queue.Queue()
        engine = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                rank = self.headers["X-data-parallel-rank"]
                leg = Leg(self.headers["X-Request-Id"], int(rank) if rank else None, body)
                try:
                    self.reply(answer(leg))
                except BaseException as error:
                    engine.errors.put(error)
                    raise

            def reply(self, answer: dict[str, Any]) -> None:
                body = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer((HOST, 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server.server_address[1]}"


@contextlib.contextmanager
def proxy(connector: str, prefill: str, decode: str) -> Iterator[int]:
    """The port of a proxy between two workers."""
    command = [executable("hetero-kv-proxy", "HETERO_KV_PROXY"), "serve"]
    command += ["--listen", f"{HOST}:0", "--connector", connector, "--log-format", "json"]
    command += ["--prefill", prefill, "--decode", decode]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while True:
            line = process.stderr.readline()
            assert line, f"the proxy ended: {process.poll()}"
            fields = json.loads(line)["fields"]
            if fields["message"] == "serving":
                break
        # What it says from here on would fill the pipe.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield int(fields["listen"].rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


def ask(port: int, times: int, *engines: Engine) -> None:
    """Sends requests one after another; what went wrong within an engine is raised here."""
    for _ in range(times):
        connection = http.client.HTTPConnection(HOST, port, timeout=WAIT_S)
        connection.request(
            "POST", "/v1/completions", json.dumps(PROMPT), {"Content-Type": "application/json"}
        )
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        for engine in engines:
            with contextlib.suppress(queue.Empty):
                raise engine.errors.get_nowait()
        assert reply.status == 200, text


def prefilled(params: dict[str, Any] | None) -> dict[str, Any]:
    """A prefill answer as vLLM's API server makes it."""
    return {"choices": [{"text": "t", "finish_reason": "length"}], "kv_transfer_params": params}


def bare(cls: type, **attributes: Any) -> Any:
    """A scheduler side without an engine around it."""
    scheduler = object.__new__(cls)
    for name, value in attributes.items():
        setattr(scheduler, name, value)
    return scheduler


# ---- MoRI-IO -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shape:
    """One instance: `dp` ranks of `dp_size`, the first of which is `dp_rank0`."""

    dp: int = 1
    dp_size: int = 1
    dp_rank0: int = 0
    tp: int = 1
    handshake: int = 6301
    notify: int = 61005

    def worker(self, url: str) -> str:
        tp = f",tp={self.tp}" if self.tp > 1 else ""
        return (
            f"{url},dp={self.dp},dp-size={self.dp_size},dp-rank0={self.dp_rank0}{tp},"
            f"handshake={self.handshake},notify={self.notify}"
        )

    def listens(self, global_rank: int, tp_rank: int = 0) -> int:
        """Where vLLM's worker of that rank listens for notifications."""
        local = moriio_common.fold_local_rank(global_rank, self.dp)
        return self.notify + moriio_common.get_port_offset(local, tp_rank)

    def scheduler(self, mode: moriio_common.MoRIIOMode, leg: Leg, producer: bool) -> Any:
        rank = self.dp_rank0 + (leg.rank or 0)
        return bare(
            moriio_connector.MoRIIOConnectorScheduler,
            mode=mode,
            is_producer=producer,
            engine_id=f"{HOST}:{self.handshake}",
            host_ip=HOST,
            handshake_port=self.handshake,
            side_notify_port=self.notify,
            tp_size=self.tp,
            _global_dp_rank=rank,
            _is_kv_master=moriio_common.pod_index(rank, self.dp) == 0,
            _has_mamba=False,
            _is_hma_required=False,
            _max_decode_tail_blocks=1,
            _defer_timeout=60.0,
            kv_cache_config=SimpleNamespace(
                kv_cache_groups=[0], select_transfer_block_ids=lambda blocks: blocks
            ),
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(
                    data_parallel_size=self.dp_size,
                    data_parallel_size_local=self.dp,
                    tensor_parallel_size=self.tp,
                )
            ),
            _reqs_need_send={},
            _reqs_need_save={},
            _reqs_need_recv={},
            _req_kv_params={},
            _deferred_send_deadlines={},
            transfer_id_to_request_id={},
            request_id_to_transfer_id={},
        )


SHAPES = [
    pytest.param(Shape(), Shape(handshake=7000, notify=7100), id="1-1"),
    pytest.param(Shape(dp=4, dp_size=4), Shape(tp=8, handshake=7000), id="dp4-tp8"),
    pytest.param(Shape(tp=8), Shape(dp=4, dp_size=4, notify=7100), id="tp8-dp4"),
    pytest.param(Shape(dp=8, dp_size=16, dp_rank0=8), Shape(dp=2, dp_size=2), id="part-of-dp16"),
]


@pytest.mark.parametrize(("p", "d"), SHAPES)
def test_moriio_read_points_decode_at_the_rank_that_ran_the_prefill(p: Shape, d: Shape) -> None:
    made: list[tuple[int, dict[str, Any]]] = []
    read: list[tuple[Leg, moriio_common.ReqMeta]] = []

    def prefill(leg: Leg) -> dict[str, Any]:
        scheduler = p.scheduler(moriio_common.MoRIIOMode.READ, leg, producer=True)
        keeps, params = scheduler.request_finished(leg.request(), BLOCKS)
        assert keeps
        made.append((scheduler._global_dp_rank, params))
        return prefilled(params)

    def decode(leg: Leg) -> dict[str, Any]:
        scheduler = d.scheduler(moriio_common.MoRIIOMode.READ, leg, producer=False)
        request = leg.request()
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 4],))
        scheduler.update_state_after_alloc(request, blocks, num_external_tokens=40)
        local = scheduler._reqs_need_recv[request.request_id][1]
        params = scheduler._req_kv_params[request.request_id]
        meta = moriio_common.MoRIIOConnectorMetadata()
        meta.add_new_req(request.request_id, local, params)
        read.append((leg, meta.reqs_to_recv[request.request_id]))
        return {}

    engines = Engine(prefill), Engine(decode)
    with proxy("moriio-read", p.worker(engines[0].url), d.worker(engines[1].url)) as port:
        ask(port, 2 * p.dp * d.dp, *engines)
    assert {rank for rank, _ in made} == set(range(p.dp_rank0, p.dp_rank0 + p.dp))
    assert {leg.rank for leg, _ in read} == (set(range(d.dp)) if d.dp > 1 else {None})
    for (rank, params), (_, meta) in zip(made, read, strict=True):
        assert meta.remote_block_ids == BLOCKS
        assert meta.transfer_id == params["transfer_id"]
        assert (meta.remote_host, meta.remote_handshake_port) == (HOST, p.handshake)
        assert meta.tp_size == p.tp
        # The reader dials every rank up to the size at one host, and reads from this one of them.
        assert meta.remote_dp_size == p.dp
        assert meta.remote_dp_rank == rank - p.dp_rank0
        offset = moriio_common.get_port_offset(meta.remote_dp_rank, 0, max(1, meta.tp_size))
        if p.tp == 1:
            assert meta.remote_notify_port + offset == p.listens(rank)


@pytest.mark.parametrize(("p", "d"), SHAPES)
def test_moriio_write_makes_both_sides_name_each_other(
    p: Shape, d: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: dict[str, tuple[int, moriio_common.ReqMeta]] = {}
    told: dict[str, tuple[int, list[tuple[str, int]]]] = {}
    notified: dict[str, list[tuple[str, int]]] = {}

    def notify(_: Any, **call: Any) -> None:
        assert call["block_notify_list"] == [1, 2, 4]
        notified.setdefault(call["transfer_id"], []).append((call["host"], call["port"]))

    monkeypatch.setattr(moriio_connector.MoRIIOConnectorScheduler, "send_notify_block", notify)

    def prefill(leg: Leg) -> dict[str, Any]:
        scheduler = p.scheduler(moriio_common.MoRIIOMode.WRITE, leg, producer=True)
        request = leg.request()
        blocks = SimpleNamespace(get_block_ids=lambda: BLOCKS)
        scheduler.update_state_after_alloc(request, blocks, num_external_tokens=0)
        _, local = scheduler._reqs_need_save[request.request_id]
        meta = moriio_common.MoRIIOConnectorMetadata()
        params = scheduler._req_kv_params[request.request_id]
        meta.add_new_req(request.request_id, local, params, write_mode=True)
        saved[leg.params["transfer_id"]] = (
            scheduler._global_dp_rank,
            meta.reqs_to_save[request.request_id],
        )
        return prefilled(None)

    def decode(leg: Leg) -> dict[str, Any]:
        scheduler = d.scheduler(moriio_common.MoRIIOMode.WRITE, leg, producer=False)
        transfer_id = leg.params["transfer_id"]
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 4],))
        scheduler.update_state_after_alloc(leg.request(), blocks, num_external_tokens=40)
        told[transfer_id] = (scheduler._global_dp_rank, notified[transfer_id])
        # Prefill's leg is on its way too; it need not have been first.
        deadline = time.monotonic() + WAIT_S
        while transfer_id not in saved and time.monotonic() < deadline:
            time.sleep(0.002)
        return {}

    engines = Engine(prefill), Engine(decode)
    with proxy("moriio-write", p.worker(engines[0].url), d.worker(engines[1].url)) as port:
        ask(port, 2 * p.dp * d.dp, *engines)
    assert saved.keys() == told.keys()
    assert len(saved) == 2 * p.dp * d.dp
    for transfer_id, (prefill_rank, meta) in saved.items():
        decode_rank, notes = told[transfer_id]
        # vLLM tells as many TP ranks as it has itself; of the first, the socket is the rank's own.
        assert notes[0] == (HOST, p.listens(prefill_rank))
        assert meta.transfer_id == transfer_id
        assert (meta.remote_host, meta.remote_handshake_port) == (HOST, d.handshake)
        assert meta.remote_dp_size == d.dp_size
        assert meta.tp_size == (d.tp if d.tp > 1 else 0)
        folded = moriio_common.fold_local_rank(decode_rank, meta.remote_dp_size_local)
        port_of_rank = meta.remote_notify_port + moriio_common.get_port_offset(folded, 0)
        assert port_of_rank == d.listens(decode_rank)


# ---- NIXL ----------------------------------------------------------------------------------------


def nixl_scheduler(**more: Any) -> Any:
    return bare(
        pull_scheduler.NixlPullConnectorScheduler,
        engine_id="engine-p",
        side_channel_host=HOST,
        side_channel_port=5600,
        transfer_tp_size=2,
        is_bidirectional_kv_xfer_enabled=False,
        use_host_buffer=False,
        _kv_lease_duration=30.0,
        _heartbeat_req_engine={},
        _heartbeat_by_engine={},
        _reqs_need_send={},
        _reqs_need_recv={},
        _reqs_need_save={},
        _reqs_not_processed=set(),
        _reqs_in_batch=set(),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, pipeline_parallel_size=1
            )
        ),
        get_exchange_clipped_blocks=lambda blocks, **_: blocks,
        _truncate_request_for_prefill=lambda request: None,
        **more,
    )


def test_nixl_decode_pulls_what_prefill_keeps() -> None:
    kept: list[str] = []
    pulled: list[tuple[str, Any]] = []

    def prefill(leg: Leg) -> dict[str, Any]:
        scheduler = nixl_scheduler()
        request = leg.request()
        scheduler.on_new_request(request)
        assert scheduler._heartbeat_by_engine == {}
        keeps, params = scheduler.request_finished(request, BLOCKS)
        assert keeps
        kept.append(request.request_id)
        return prefilled(params)

    def decode(leg: Leg) -> dict[str, Any]:
        scheduler = nixl_scheduler()
        request = leg.request()
        scheduler.on_new_request(request)
        beats = scheduler._heartbeat_by_engine["engine-p"]
        blocks = SimpleNamespace(blocks=[[]], get_unhashed_block_ids_all_groups=lambda: [[1, 2, 4]])
        scheduler.update_state_after_alloc(request, blocks, num_external_tokens=40)
        assert scheduler._reqs_need_recv[request.request_id][1] == [[1, 2, 4]]
        assert leg.params["remote_block_ids"] == BLOCKS
        pulled.append((next(iter(beats.req_ids)), (beats.host, beats.port, beats.tp_size)))
        return {}

    engines = Engine(prefill), Engine(decode)
    with proxy("nixl", engines[0].url, engines[1].url) as port:
        ask(port, 3, *engines)
    assert pulled == [(request_id, (HOST, 5600, 2)) for request_id in kept]
    assert len(set(kept)) == 3


# ---- Mooncake ------------------------------------------------------------------------------------


def mooncake_scheduler(producer: bool) -> Any:
    return bare(
        mooncake_connector.MooncakeConnectorScheduler,
        is_kv_producer=producer,
        is_kv_consumer=not producer,
        _reqs_need_send={},
        _reqs_need_recv={},
        _reqs_not_processed=set(),
        get_sw_clipped_blocks=lambda blocks: blocks,
    )


def test_mooncake_decode_asks_the_rank_that_keeps_the_transfer() -> None:
    ids = ["engine-rank-0", "engine-rank-1"]
    kept: list[tuple[str, str]] = []
    pulled: list[tuple[str, str]] = []

    def prefill(leg: Leg) -> dict[str, Any]:
        scheduler = mooncake_scheduler(producer=True)
        keeps, params = scheduler.request_finished(leg.request(), tuple(BLOCKS))
        assert keeps
        assert params is None
        kept.append((ids[leg.rank or 0], leg.params["transfer_id"]))
        return prefilled(None)

    def decode(leg: Leg) -> dict[str, Any]:
        scheduler = mooncake_scheduler(producer=False)
        request = leg.request()
        blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: [[1, 2, 4]])
        scheduler.update_state_after_alloc(request, blocks, num_external_tokens=40)
        local = scheduler._reqs_need_recv[request.request_id][1]
        meta = mooncake_connector.MooncakeConnectorMetadata()
        meta.add_new_req(request.request_id, local, request.kv_transfer_params)
        ((engine, asked),) = meta.reqs_to_recv.items()
        pull = asked[request.request_id]
        # As the decode engine finds the ranks.
        found = httpx.get(pull.remote_bootstrap_addr + "/query").json()
        assert engine in {entry["engine_id"] for entry in found.values()}
        pulled.append((engine, pull.transfer_id))
        return {}

    server = MooncakeBootstrapServer(HOST, 0)
    server.start()
    try:
        for rank, engine_id in enumerate(ids):
            worker = {"engine_id": engine_id, "dp_rank": rank, "tp_rank": 0, "pp_rank": 0}
            reply = httpx.post(
                f"http://{HOST}:{server.port}/register", json={**worker, "addr": f"tcp://x:{rank}"}
            )
            reply.raise_for_status()
        engines = Engine(prefill), Engine(decode)
        worker_url = f"{engines[0].url},dp=2,bootstrap={server.port}"
        with proxy("mooncake", worker_url, engines[1].url) as port:
            ask(port, 4, *engines)
    finally:
        server.shutdown()
    assert pulled == kept
    assert [engine for engine, _ in kept] == ids * 2
