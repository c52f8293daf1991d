"""Engines that are killed and started anew in the middle of a run, behind the proxy.

Clients go on asking all the time. Whatever happens to an engine, a request ends, an answer is
right or a failure, and once the engine is back everything is served again and nothing is held.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import Engine, EngineSpec

from . import matrix_report
from .conftest import References
from .fault_site import GRACE_S, LEASE_S, SLACK_S, Site, open_site, spec
from .legs import Reply, completion, post
from .processes import kill_at_once, wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]

LEASES_GRANTED = "hetero_kv_leases_granted_total"
CLIENTS = 3
# Answers in a row, all right, that end a run: more than either prefill engine takes by accident.
SETTLED = 12
HTTP_PORTS = {"first": 31_960, "second": 31_961, "decode": 31_962}
PORT_RANGES = {"first": "32220-32223", "second": "32224-32227", "decode": "32228-32231"}
PREFILL = ("first", "second")


def engine_spec(name: str, references: References) -> EngineSpec:
    """Always on the same ports and with the same engine id, as a restarted server is."""
    settings: dict[str, Any] = {"transport": "tcp", "port_range": PORT_RANGES[name]}
    if name in PREFILL:
        settings["lease_s"] = LEASE_S
    return spec(
        name,
        "prefill" if name in PREFILL else "decode",
        references.of("gqa"),
        settings,
        engine_id=f"restarted-{name}",
        port=HTTP_PORTS[name],
    )


@pytest.fixture(scope="module")
def site(references: References, engine_logs: Path) -> Iterator[Site]:
    reference = references.of("gqa")
    specs = [engine_spec(name, references) for name in HTTP_PORTS]
    with open_site(specs, reference, engine_logs / "restart", tuple(HTTP_PORTS)) as running:
        yield running


class Clients:
    """Ask one prompt after the other, each with KV of its own, until told to stop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._serial = itertools.count()
        self.verdicts: list[str] = []
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150.0)
        assert not any(thread.is_alive() for thread in self._threads), "a request never ended"

    def _ask(self) -> None:
        prompts = self._site.reference.fault_prompts
        expected = self._site.reference.fault_expected
        while not self._stop.is_set():
            serial = next(self._serial)
            index = serial % len(prompts)
            body = completion(prompts[index].token_ids, cache_salt=f"run-{time.time_ns()}-{serial}")
            verdict = self._judge(post(self._site.port, body), expected[index])
            with self._lock:
                self.verdicts.append(verdict)
            if verdict != "right":
                # A proxy with nowhere to send to refuses at once.
                time.sleep(0.2)

    @staticmethod
    def _judge(reply: Reply, expected: tuple[int, ...]) -> str:
        if reply.status == 200:
            return "right" if reply.tokens == [expected] else f"WRONG: {reply.tokens}"
        return f"failed {reply.status}"

    def settle(self, timeout_s: float, what: str) -> None:
        """Returns once the last answers are all right, none of them from before this call."""
        begun = len(self.verdicts)

        def settled() -> bool:
            with self._lock:
                last = self.verdicts[begun:][-SETTLED:]
            return len(last) == SETTLED and set(last) == {"right"}

        wait_until(settled, timeout_s, f"{SETTLED} right answers in a row {what}", 0.2)

    def require_no_wrong_answer(self) -> None:
        with self._lock:
            wrong = [verdict for verdict in self.verdicts if verdict.startswith("WRONG")]
        assert not wrong, wrong[:3]

    def tally(self) -> dict[str, int]:
        with self._lock:
            return {verdict: self.verdicts.count(verdict) for verdict in set(self.verdicts)}


@pytest.fixture(scope="module")
def restarts() -> Iterator[contextlib.ExitStack]:
    """Stops what was started anew when the module is done."""
    with contextlib.ExitStack() as stack:
        yield stack


def start_anew(
    site: Site, name: str, references: References, restarts: contextlib.ExitStack
) -> Engine:
    """The engine of this name, killed a moment ago, on its ports again and ready."""
    # Reaps what was killed.
    site[name].kill()
    engine = Engine(engine_spec(name, references), site.logs / f"again-{name}")
    restarts.callback(engine.stop)
    engine.wait_ready()
    return engine


@pytest.mark.parametrize("name", ["first", "decode"])
def test_restart_in_mid_run(
    site: Site, references: References, restarts: contextlib.ExitStack, name: str
) -> None:
    with Clients(site) as clients:
        clients.settle(60.0, "before the restart")
        begun_s = time.monotonic()
        kill_at_once(site[name])
        if name == "first":
            clients.settle(60.0, "with one prefill engine")
        again = start_anew(site, name, references, restarts)
        restarted_s = time.monotonic() - begun_s
        clients.settle(90.0, "after the restart")
        if name == "first":
            wait_until(lambda: again.metric(LEASES_GRANTED) > 0, 60.0, "it is given requests again")
    clients.require_no_wrong_answer()
    matrix_report.measure(
        f"restart of {name} in mid-run",
        restarted_s=round(restarted_s, 1),
        answers=clients.tally(),
    )
    demo.warm_up([again])
    site.replace(again, name)
    # What a dead decode engine had claimed ends with its lease at the latest.
    site.require_nothing_held(within_s=LEASE_S + GRACE_S + SLACK_S)
