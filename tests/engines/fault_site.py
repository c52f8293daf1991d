"""Engines on which faults are tried, and what must hold after each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import (
    Engine,
    EngineSpec,
    Sample,
    connector_config,
    http_get,
    running,
)
from hetero_kv.demo.processes import GuardedProcess
from hetero_kv.demo.witness import HeldBlocks

from .processes import wait_until
from .reference import Reference

# Two loaded cores may take seconds for a step; a lease must outlive that.
LEASE_S = 10.0
GRACE_S = 0.5
# From the end of a lease to the sample of the engine's next step.
SLACK_S = 5.0
FAILURES = "hetero_kv_load_failures_total"


def spec(
    name: str, role: str, reference: Reference, settings: Mapping[str, Any], **more: Any
) -> EngineSpec:
    """An engine of one rank with our connector. `policy` is its `kv_load_failure_policy`."""
    side = "prefill" if role == "prefill" else "decode"
    config = connector_config(
        "prefill" if role == "prefill" else "decode", settings, more.pop("policy", None)
    )
    if (engine_id := more.pop("engine_id", None)) is not None and config is not None:
        config["engine_id"] = engine_id
    return EngineSpec(
        name=name,
        model=more.pop("model", reference.model),
        role="prefill" if side == "prefill" else "decode",
        kv_transfer_config=config,
        **more,
    )


@dataclasses.dataclass
class Site:
    """Engines by name, with the blocks that were free at their start."""

    reference: Reference
    engines: dict[str, Engine]
    port: int
    logs: Path

    def __post_init__(self) -> None:
        self.blocks = {name: HeldBlocks([engine]) for name, engine in self.engines.items()}

    def add(self, engine: Engine, name: str) -> None:
        """One more engine, warm and asked for nothing yet."""
        self.engines[name] = engine
        self.blocks[name] = HeldBlocks([engine])

    def replace(self, engine: Engine, name: str) -> None:
        """The engine of this name, started anew by the same spec."""
        self.engines[name] = engine
        self.blocks[name] = self.blocks[name].of_restarted([engine])

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    def prompt(self, tokens_min: int) -> tuple[list[int], tuple[int, ...]]:
        """The shortest prompt of at least this length, and what it is to be answered with."""
        reference = self.reference
        pairs = zip(reference.fault_prompts, reference.fault_expected, strict=True)
        prompt, expected = min(
            (pair for pair in pairs if len(pair[0]) >= tokens_min), key=lambda pair: len(pair[0])
        )
        return list(prompt.token_ids), expected

    def log(self, name: str) -> str:
        return self.engines[name].process.log_path.read_text(errors="replace")

    def require_nothing_held(self, *names: str, within_s: float = 5.0) -> None:
        """Leases 0, blocks as at the start, cache usage 0, on each of these engines."""
        for name in names or tuple(self.engines):
            held = self.blocks[name].settle(within_s)
            assert held.nothing, f"{name}, {within_s} s later: {held}"

    def require_serving(self, name: str = "decode") -> None:
        """The engine lives and answers an ordinary request rightly."""
        from .legs import completion, post

        prompt, expected = self.prompt(40)
        salt = f"serving-{time.monotonic()}"
        reply = post(self.engines[name].port, completion(prompt, cache_salt=salt))
        assert reply.status == 200, reply.raw[:500]
        assert reply.tokens == [expected]

    def require_ready(self) -> None:
        """The proxy sees both sides healthy again."""

        def ready() -> bool:
            with contextlib.suppress(OSError):
                return http_get(self.port, "/ready", 2.0)[0] == 200
            return False

        wait_until(ready, 30.0, "the proxy is ready", 0.2)


def failures(engine: Engine) -> dict[tuple[str, str], float]:
    """Counted load failures by (reason, field)."""
    samples: Sequence[Sample] = engine.metrics()
    return {
        (sample.labels["reason"], sample.labels["field"]): sample.value
        for sample in samples
        if sample.name == FAILURES
    }


def risen(
    engine: Engine, before: Mapping[tuple[str, str], float], timeout_s: float = 5.0
) -> dict[tuple[str, str], float]:
    """What was counted since; waits for something: metrics trail the answer by a step."""
    end = time.monotonic() + timeout_s
    while True:
        now = failures(engine)
        new = {key: now[key] - before.get(key, 0) for key in now if now[key] > before.get(key, 0)}
        if new or time.monotonic() > end:
            return new
        time.sleep(0.05)


@contextlib.contextmanager
def open_site(
    specs: Sequence[EngineSpec], reference: Reference, logs: Path, behind_proxy: Sequence[str]
) -> Iterator[Site]:
    """The engines, warm; those named are behind a proxy."""
    with running(specs, logs) as engines:
        demo.warm_up(engines)
        by_name = {engine.name: engine for engine in engines}
        chosen = [by_name[name] for name in behind_proxy]
        sides = {
            role: [engine for engine in chosen if engine.spec.role == role]
            for role in ("prefill", "decode")
        }
        with demo.proxy(sides["prefill"], sides["decode"], "proxy", logs) as port:
            yield Site(reference, by_name, port, logs)


__all__ = ["GuardedProcess", "Site", "failures", "open_site", "risen", "spec"]
