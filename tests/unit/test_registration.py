"""Engines that register at a real ``hetero-kv-proxy``: what they say, and that heartbeats need
nothing of the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed")

from contract_engine import BLOCK_SIZE, engines, make_config
from hetero_kv import _core
from hetero_kv.config import Settings, SettingsError
from hetero_kv.demo.witness import executable
from hetero_kv.registration import ranks_behind_url, registration, served_names

pytestmark = pytest.mark.vllm

HOST = "127.0.0.1"
WAIT_S = 20.0
PUBLIC = "http://10.0.0.9:8000"


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def proxy(admin_port: int, *flags: str, port: int = 0) -> Iterator[None]:
    """A proxy whose admin listener is there; clients find it at ``port``."""
    command = [executable("hetero-kv-proxy", "HETERO_KV_PROXY"), "serve", *flags]
    command += ["--listen", f"{HOST}:{port}", "--admin-listen", f"{HOST}:{admin_port}"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until("the proxy listens", lambda: answers(admin_port))
        yield
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        workers(port)
        return True
    return False


def workers(port: int) -> list[dict[str, Any]]:
    connection = http.client.HTTPConnection(HOST, port, timeout=WAIT_S)
    try:
        connection.request("GET", "/workers")
        listed = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    assert isinstance(listed, list)
    return listed


def until(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def settings(port: int, **more: Any) -> dict[str, Any]:
    return {
        "register_url": f"http://{HOST}:{port}/",
        "register_public_url": PUBLIC,
        "register_interval_s": 0.3,
        **more,
    }


def ids(port: int) -> list[str]:
    return [one["id"] for one in workers(port)]


def test_an_engine_tells_what_it_is_and_says_goodbye(config_folder: Path) -> None:
    port = free_port()
    given = settings(port, register_dp=4, lease_s=2.5, grace_ms=200.4)
    with proxy(port):
        with engines(
            (config_folder, "kv_producer", {"settings": given, "engine_id": "p0"}),
        ) as (engine,):
            until("it is registered", lambda: ids(port) == ["prefill-0"])
            (one,) = workers(port)
            assert (one["url"], one["dp"], one["source"]) == (PUBLIC, 4, "registered")
            kv = one["kv"]
            assert len(bytes.fromhex(one["engine_id"])) == 8
            assert kv["incarnation"] == one["engine_id"]
            control = engine.connector._scheduler._core.port
            assert kv["control"] == f"127.0.0.1:{control}"
            assert (kv["connector"], kv["mode"], kv["engine_id"]) == ("hetero", "read", "p0")
            assert (kv["tp_size"], kv["dp_rank"], kv["block_size"]) == (1, 0, BLOCK_SIZE)
            assert kv["dtype"] == "float32"
            # How long the proxy waits for blocks that decode was not seen to take.
            assert kv["lease_ms"] == 2701
            # What the proxy pairs workers by.
            compat = one["compat"]
            assert one["told"] == {
                "model": kv["model"],
                "dtype": compat["kv_cache_dtype"],
                "kv_heads": compat["kv_heads"],
                "layout": compat["page_format"].replace(" ", "_").replace(",", "_"),
                "mode": "read",
                "control": kv["control"],
            }
            assert one["compat"] == engine.workers[0].connector.get_handshake_metadata().fields | {
                name: one["compat"][name] for name in ("layers", "kv_scales")
            }
            assert one["expires_in_ms"] <= 900
        # Removed at once, and not when its time was over.
        assert ids(port) == []


def test_an_engine_with_mla_and_adapters_registers(
    config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _core.Scheduler

    def with_mla(options: str, cards: list[bytes]) -> Any:
        changed = json.loads(options)
        changed["fields"]["kv_heads"] = "0"
        return real(json.dumps(changed), cards)

    monkeypatch.setattr("hetero_kv.scheduler._core", SimpleNamespace(Scheduler=with_mla))
    port = free_port()
    adapters = {"settings": settings(port), "enable_lora": True}
    with proxy(port), engines((config_folder, "kv_consumer", adapters)):
        until("it is registered", lambda: ids(port) == ["decode-0"])
        assert "lease_ms" not in workers(port)[0]["kv"]
        told = workers(port)[0]["told"]
        assert "kv_heads" not in told
        # A name of an adapter would be none of the model's.
        assert "model" not in told


def test_heartbeats_go_on_while_the_interpreter_is_held(config_folder: Path) -> None:
    port = free_port()
    spec = (config_folder, "kv_consumer", {"settings": settings(port)})
    with proxy(port), engines(spec):
        until("it is registered", lambda: ids(port) == ["decode-0"])
        begun = time.monotonic()
        # Keeps the interpreter lock, unlike `ctypes.CDLL`: no other Python thread runs meanwhile.
        ctypes.PyDLL(None).sleep(3)
        assert time.monotonic() - begun >= 3
        # Three seconds are three times to live: forgotten and back, it would have another id.
        assert ids(port) == ["decode-0"]


def test_a_proxy_that_starts_later_and_asks_for_a_key_is_found(
    config_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    key = tmp_path / "key"
    key.write_text("# of the cluster\nan-admin-key-of-ours\n")
    signed = settings(port, register_key_file=str(key))
    unsigned = {**settings(port), "register_public_url": "http://10.0.0.8:8000"}
    with engines(
        (config_folder, "kv_producer", {"settings": signed}),
        (config_folder, "kv_consumer", {"settings": unsigned}),
    ):
        # Long enough for several tries by both.
        time.sleep(1.5)
        with proxy(port, "--admin-key-file", str(key)):
            until("the one that signs is registered", lambda: ids(port) == ["prefill-0"])
            time.sleep(1.0)
            assert ids(port) == ["prefill-0"]
        said = capfd.readouterr().err
        # Each says so once, however often it tries.
        assert said.count("cannot reach the proxy to register") == 2
        assert said.count("401 signature_missing") == 1
        with proxy(port, "--admin-key-file", str(key)):
            until("it is registered again", lambda: ids(port) == ["prefill-0"])


class Api(BaseHTTPRequestHandler):
    """An engine's API server: it is well, and answers whatever it is asked."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked_to_keep = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        done = {"choices": [{"text": "t", "finish_reason": "length"}]}
        self.answer({**done, "kv_transfer_params": {"of": 1}} if asked_to_keep else done)

    def answer(self, told: dict[str, Any]) -> None:
        text = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


class ApiServer(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A proxy that is killed breaks its connections."""


@contextlib.contextmanager
def api() -> Iterator[str]:
    """Its URL."""
    server = ApiServer((HOST, 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def complete(port: int, model: str) -> int:
    """The status of one request."""
    connection = http.client.HTTPConnection(HOST, port, timeout=WAIT_S)
    try:
        body = json.dumps({"model": model, "prompt": "p", "max_tokens": 2})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_idle_engines_stay_and_are_back_within_their_time_to_live(config_folder: Path) -> None:
    interval_s = 0.5
    live_s = 3 * interval_s
    port, clients = free_port(), free_port()
    flags = ("--health-interval-ms", "50")
    with api() as p, api() as d:
        given = [
            settings(port, register_interval_s=interval_s, register_public_url=url)
            for url in (p, d)
        ]
        with engines(
            (config_folder, "kv_producer", {"settings": given[0]}),
            (config_folder, "kv_consumer", {"settings": given[1]}),
        ):
            with proxy(port, *flags, port=clients):
                until("both are registered", lambda: len(ids(port)) == 2)
                known, model = sorted(ids(port)), workers(port)[0]["kv"]["model"]
                # Nobody asks anything of them; whoever expired and came back would have another id.
                time.sleep(3 * live_s)
                assert sorted(ids(port)) == known
                until("both are ready", lambda: all(one["routable"] for one in workers(port)))
                assert complete(clients, model) == 200
            # It comes back without memory.
            time.sleep(2 * live_s)
            with proxy(port, *flags, port=clients):
                begun = time.monotonic()
                until("both are registered again", lambda: len(ids(port)) == 2)
                assert time.monotonic() - begun < live_s
                until("both are ready", lambda: all(one["routable"] for one in workers(port)))
                assert complete(clients, model) == 200


def test_an_engine_with_a_bad_key_file_does_not_start(config_folder: Path, tmp_path: Path) -> None:
    given = settings(free_port(), register_key_file=str(tmp_path / "none"))
    with (
        pytest.raises(ValueError, match=r"registration: register_key_file: .*none: No such file"),
        engines((config_folder, "kv_consumer", {"settings": given})),
    ):
        pass


def test_the_role_of_an_engine_that_is_both_has_to_be_said(config_folder: Path) -> None:
    def told(role: str, **more: Any) -> Any:
        both = role == "kv_both"
        engine: Any = SimpleNamespace(
            producer=both or role == "kv_producer",
            consumer=both or role == "kv_consumer",
            dp_rank=0,
            dp_size=1,
        )
        config = make_config(config_folder, role, settings=settings(1, **more))
        return registration(config, Settings(settings(1, **more)), engine)

    assert told("kv_producer")["role"] == "prefill"
    assert told("kv_consumer")["role"] == "decode"
    assert told("kv_consumer", register_role="prefill")["role"] == "prefill"
    assert told("kv_both", register_role="decode")["role"] == "decode"
    with pytest.raises(SettingsError, match="register_role: needed with kv_role kv_both"):
        told("kv_both")


def test_one_scheduler_of_each_api_server_registers() -> None:
    def parallel(**given: Any) -> Any:
        base = {
            "data_parallel_external_lb": False,
            "data_parallel_hybrid_lb": False,
            "data_parallel_rank_local": 0,
            "data_parallel_size_local": 1,
        }
        return SimpleNamespace(**{**base, **given})

    def engine(dp_rank: int, dp_size: int) -> Any:
        return SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size)

    internal = [ranks_behind_url(parallel(), engine(rank, 4)) for rank in range(3)]
    assert internal == [(True, 4), (False, 4), (False, 4)]
    # The first rank of the second host has local rank 0 and no server.
    assert not ranks_behind_url(parallel(data_parallel_rank_local=0), engine(2, 4))[0]
    for local, registers in ((None, True), (0, True), (1, False)):
        hybrid = parallel(
            data_parallel_hybrid_lb=True, data_parallel_rank_local=local, data_parallel_size_local=2
        )
        assert ranks_behind_url(hybrid, engine(5, 8)) == (registers, 2)
    external = parallel(data_parallel_external_lb=True, data_parallel_rank_local=3)
    assert ranks_behind_url(external, engine(7, 8)) == (True, 1)


def test_the_names_that_clients_use_are_told() -> None:
    names: list[tuple[Any, list[str]]] = [
        (["a", "b"], ["a", "b"]),
        ("c", ["c"]),
        (None, ["m"]),
        ([], ["m"]),
    ]
    for served, told in names:
        assert served_names(SimpleNamespace(served_model_name=served, model="m")) == told
