"""MoRI-IO workers that register at ``hetero-kv-proxy`` over ZeroMQ, by vLLM's own code.

The frame is made by vLLM's worker and sent by the child process that vLLM starts for it, over
libzmq. The form of older versions, and what breaks frames, is sent by pyzmq.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

# Also what vLLM's code imports in place of msgpack.
from test_proxy_legs import HOST, PROMPT, Engine, Leg, prefilled
from vllm.distributed.kv_transfer.kv_connector.v1.moriio import (
    moriio_common,
    moriio_connector,
)

from hetero_kv.demo.witness import executable

WAIT_S = 20.0


@contextlib.contextmanager
def proxy(connector: str, *flags: str) -> Iterator[tuple[int, int]]:
    """The ports of a proxy that knows no worker: its clients', and ZeroMQ's."""
    command = [executable("hetero-kv-proxy", "HETERO_KV_PROXY"), "serve", *flags]
    command += ["--listen", f"{HOST}:0", "--zmq-listen", f"{HOST}:0", "--connector", connector]
    command += ["--log-format", "json", "--health-interval-ms", "50"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    ports: dict[str, int] = {}
    try:
        assert process.stderr is not None
        while "serving" not in ports:
            line = process.stderr.readline()
            assert line, f"the proxy ended: {process.poll()}"
            fields = json.loads(line)["fields"]
            if "listen" in fields:
                ports[fields["message"]] = int(fields["listen"].rpartition(":")[2])
        # What it says from here on would fill the pipe.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield ports["serving"], ports["registering over ZeroMQ"]
    finally:
        process.kill()
        process.wait()


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=WAIT_S)
    connection.request("GET", path)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def workers(port: int) -> list[dict[str, Any]]:
    listed = json.loads(get(port, "/workers"))
    assert isinstance(listed, list)
    return listed


def until(what: str, holds: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def frames(port: int, outcome: str) -> float:
    name = f'hetero_kv_proxy_zmq_frames_total{{outcome="{outcome}"}} '
    lines = get(port, "/metrics").splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.fixture
def msgpack_for_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's child imports a package that vLLM's wheel does not ask for."""
    code = "import msgspec\ndumps = msgspec.msgpack.encode\nloads = msgspec.msgpack.decode\n"
    (tmp_path / "msgpack.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def heartbeat(engine: Engine, zmq_port: int, role: str, mode: str, dp: int = 1) -> Any:
    """vLLM's heartbeat for a worker of these sizes; it runs from here on."""
    worker = SimpleNamespace(
        is_producer=role == "P",
        request_address=engine.url.removeprefix("http://"),
        local_ip=HOST,
        handshake_port=6301,
        notify_port=61005,
        moriio_config=SimpleNamespace(dp_size=dp, tp_size=1),
        mode=moriio_common.MoRIIOMode[mode],
        proxy_ip=HOST,
        proxy_ping_port=zmq_port,
    )
    return moriio_connector.MoRIIOConnectorWorker._start_heartbeat(worker)


@contextlib.contextmanager
def beating(*beats: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for beat in beats:
            beat.shutdown()


@pytest.mark.usefixtures("msgpack_for_children")
def test_vllms_own_heartbeat_registers_a_pair_that_then_serves() -> None:
    legs: list[Leg] = []

    def prefill(leg: Leg) -> dict[str, Any]:
        legs.append(leg)
        return prefilled({"remote_block_ids": [[1]], "remote_dp_rank": leg.rank, "tp_size": 1})

    def decode(leg: Leg) -> dict[str, Any]:
        legs.append(leg)
        return {}

    p, d = Engine(prefill), Engine(decode)
    with proxy("moriio-read", "--zmq-ttl-ms", "9000") as (port, zmq_port):
        assert workers(port) == []
        beats = heartbeat(p, zmq_port, "P", "READ", dp=2), heartbeat(d, zmq_port, "D", "READ")
        with beating(*beats):
            both = lambda: [one["routable"] for one in workers(port)] == [True, True]  # noqa: E731
            until("both are registered and probed", both)
            seen = [(one["url"], one["role"], one["dp"]) for one in workers(port)]
            assert seen == [(p.url, "prefill", 2), (d.url, "decode", 1)]
            connection = http.client.HTTPConnection(HOST, port, timeout=WAIT_S)
            for _ in range(2):
                head = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(PROMPT), head)
                reply = connection.getresponse()
                assert reply.read()
                assert reply.status == 200
            assert {leg.rank for leg in legs[::2]} == {0, 1}
            address = moriio_common.get_peer_zmq_from_request_id(
                f"cmpl-{legs[1].request_id}-0-1a2b3c4d", is_producer=False
            )
            assert str(address).startswith(f"host:{HOST},handshake:6301")
            # vLLM beats every 3 s: alive for longer than the time to live is alive by heartbeats.
            time.sleep(10.5)
            assert len(workers(port)) == 2
            assert frames(port, "heartbeat") >= 4
            assert frames(port, "registered") == 2
            for beat in beats:
                beat.check_health()
        until("without heartbeats they leave", lambda: workers(port) == [])


@pytest.mark.usefixtures("msgpack_for_children")
def test_a_worker_of_the_other_mode_is_refused_and_beats_on() -> None:
    engine = Engine(lambda _: {})
    with proxy("moriio-write") as (port, zmq_port):
        beat = heartbeat(engine, zmq_port, "P", "READ")
        with beating(beat):
            until("it is refused twice", lambda: frames(port, "mode_mismatch") >= 2)
            assert workers(port) == []
            beat.check_health()


def test_pyzmq_sends_the_older_form_and_frames_that_are_refused() -> None:
    engine = Engine(lambda _: {})
    older = {
        "type": "register",
        "role": "D",
        "index": "1",
        "request_address": f"{engine.url}/v1/completions",
        "handshake_port": 6301,
        "notify_port": 61005,
        "dp_size": 1,
        "tp_size": 4,
        "transfer_mode": "WRITE",
    }
    with (
        proxy("moriio-write") as (port, zmq_port),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        # ZeroMQ's own heartbeats go over the same connection.
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 100)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2000)
        dealer.setsockopt(zmq.LINGER, 0)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        dealer.connect(f"tcp://{HOST}:{zmq_port}")
        for frame in (b"", b"\xc1", msgspec.msgpack.encode([older])):
            dealer.send(frame)
        until("three are refused", lambda: frames(port, "malformed") == 3)
        dealer.send_multipart([b"a", b"b", b"c"])
        until("too many frames end the connection", lambda: frames(port, "too_large") == 1)
        assert monitor.poll(int(WAIT_S * 1000))
        monitor.recv_multipart()
        # libzmq has dialled again by itself.
        dealer.send(msgspec.msgpack.encode(older))
        until("it is registered", lambda: frames(port, "registered") == 1)
        (one,) = workers(port)
        assert (one["url"], one["role"], one["dp"]) == (engine.url, "decode", 1)
        # A peer that answers no ping would have been let go.
        assert not monitor.poll(3000)
        dealer.send(b"x" * 9000)
        until("a large frame ends the connection", lambda: frames(port, "too_large") == 2)
        assert len(workers(port)) == 1
        dealer.disable_monitor()
