"""Two hundred requests leave nothing behind; a fork of a process of ours is safe."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

from .caches import Model
from .conftest import MakeEngine
from .harness import Engine, tokens

GQA = Model(kv_heads=4)


def _usage(engines: list[Engine]) -> dict[str, dict[str, int]]:
    found = {}
    for engine in engines:
        found[engine.name] = engine.figures()["process"]
        for tp_rank, figures in enumerate(engine.rank_figures()):
            found[f"{engine.name} rank {tp_rank}"] = figures
    return found


@pytest.mark.parametrize("transport", ["process", "tcp"])
def test_200_requests_leave_nothing_behind(make_engine: MakeEngine, transport: str) -> None:
    settings = {"transport": transport}
    p = make_engine("p", GQA, 2, producer=True, settings=settings)
    d = make_engine("d", GQA, 1, producer=False, settings=settings)

    def requests(first: int, count: int) -> None:
        batch = 10
        for at in range(first, first + count, batch):
            salts = range(at, at + batch)
            started = [p.start_prefill(tokens(2 + salt % 16, salt)) for salt in salts]
            loading = [d.decode(p.finish_prefill(*one)) for one in started]
            for i, request in enumerate(loading):
                if i == 3:
                    d.ask("abort", request.request_id)
            for i, request in enumerate(loading):
                if i != 3:
                    load = d.loaded(request)
                    assert load.ok, load.text
        for engine in (p, d):
            engine.assert_clean()

    requests(0, 50)
    before = _usage([p, d])
    requests(50, 150)
    deadline = time.monotonic() + 5
    while True:
        after = _usage([p, d])
        grown = [
            (name, figure, before[name][figure], after[name][figure])
            for name in before
            for figure, most in [("threads", 0), ("descriptors", 0), ("rss_kib", 2048)]
            if after[name][figure] > before[name][figure] + most
        ]
        # A thread that has ended may stand in procfs for a moment longer.
        if not grown or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert grown == []
    counters = p.figures()["counters"]
    assert counters["leases_granted"] == 200
    assert counters["leases_read_out"] + counters["leases_released"] == 200
    assert counters["leases_expired"] == 0


def _python(program: str) -> Any:
    """A process of its own, ended after a minute: a fork that hangs is what is looked for."""
    return subprocess.run(
        [sys.executable, "-c", program, __package__ or ""],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
        env={**_environment(), "HETERO_KV_LOG": "error"},
    )


def _environment() -> dict[str, str]:
    path = [p for p in sys.path if p]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def test_import_starts_nothing_and_can_be_forked() -> None:
    """The forkserver of every test here relies on it; this says so in words."""
    done = _python(
        """
import importlib, os, sys
import hetero_kv
from hetero_kv import _core
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started by the import"
assert "torch" not in sys.modules and "vllm" not in sys.modules
child = os.fork()
if child == 0:
    harness = importlib.import_module(sys.argv[1] + ".one_process")
    harness.one_load()
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
harness = importlib.import_module(sys.argv[1] + ".one_process")
harness.one_load()
"""
    )
    assert done.returncode == 0, done.stderr


def test_forked_child_of_a_running_engine_gets_a_clear_error() -> None:
    done = _python(
        """
import importlib, os, sys
from hetero_kv import _core
one_process = importlib.import_module(sys.argv[1] + ".one_process")
_core.init_logging("error")
pair = one_process.Pair()
pair.load()
orders = pair.order_load()
child = os.fork()
if child == 0:
    # The load is refused in words, nothing waits for a thread that is not here.
    pair.d_worker.step(orders, 0.0)
    pair.d_worker.wait(1.0)
    _, reports = pair.d_worker.take_results()
    (report,) = [one_process.json.loads(text) for text in reports]
    assert report["reason"] == "transport", report
    assert "forked child" in report["text"], report
    answer, refused = pair.prefill_with("another")
    assert answer is None and "forked child" in refused, refused
    assert pair.d.matched_tokens("d1", 0) == 0
    assert pair.p.take_orders() is not None
    pair.p.figures(), pair.p.revoke_leases(), pair.p.wait_for_orders(1.0)
    del pair
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
# The parent has noticed nothing.
pair.finish_load(orders)
pair.load()
"""
    )
    assert done.returncode == 0, done.stderr
    assert "a forked child has to start its own" in done.stderr
