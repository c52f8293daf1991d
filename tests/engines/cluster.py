"""One topology on real engines, its passes of prompts, and what they witnessed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import Engine, EngineSpec, connector_config, running
from hetero_kv.demo.report import Row
from hetero_kv.demo.topology import Topology, parse_topology
from hetero_kv.demo.witness import BYTES_READ, Counters, HeldBlocks, Planner

from . import processes
from .reference import Reference

# The prefill engines flip the KV of requests that carry this in their id, and of no others.
CONTROL = "control"


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the matrix. `transport` is the connector's setting on both sides; where it is
    `keyed`, all engines have one file of keys."""

    model: str
    topology: str
    transport: str = "auto"
    keyed: bool = False

    @property
    def id(self) -> str:
        sides = self.parsed()
        names = [
            (f"{side.instances}x" if side.instances > 1 else "")
            + f"({side.dp},{side.tp}{f',pp{side.pp}' if side.pp > 1 else ''})"
            for side in (sides.prefill, sides.decode)
        ]
        keyed = "-keyed" if self.keyed else ""
        return f"{self.model}-{names[0]}->{names[1]}-{self.transport}{keyed}"

    @property
    def expected_transport(self) -> str:
        """What `auto` must come to where both engines share a host."""
        return "process" if self.transport == "auto" else self.transport

    def parsed(self) -> Topology:
        return parse_topology(self.topology)


@dataclasses.dataclass(frozen=True)
class Pass:
    """All prompts sent once."""

    rows: list[Row]
    counters: Counters
    seconds: float


class Cluster:
    """Running engines of one case, with a proxy in front."""

    def __init__(
        self,
        case: Case,
        reference: Reference,
        prefill: Sequence[Engine],
        decode: Sequence[Engine],
        port: int,
        trace: Path,
        ready_s: float,
    ) -> None:
        self.case = case
        self.reference = reference
        self.prefill = list(prefill)
        self.decode = list(decode)
        self.port = port
        self.ready_s = ready_s
        topology = case.parsed()
        self.planner = Planner(
            topology.prefill, topology.decode, reference.shape, reference.block_tokens
        )
        self.prefill_blocks = HeldBlocks(self.prefill)
        self.decode_blocks = HeldBlocks(self.decode)
        self._judge = demo.Judge(
            self.decode, reference.prompts, reference.expected, self.planner, trace
        )
        self.growth_bytes: int | None = None
        self.checks: dict[str, bool] = {}

    @property
    def engines(self) -> list[Engine]:
        return [*self.prefill, *self.decode]

    def _send(self, name: str) -> Pass:
        begun = time.monotonic()
        rows, counters = self._judge.send(self.port, name)
        return Pass(rows, counters, time.monotonic() - begun)

    @functools.cached_property
    def honest(self) -> Pass:
        """The pass that has to come out right."""
        return self._send("pass")

    @functools.cached_property
    def control(self) -> Pass:
        """The same prompts with their KV flipped on the prefill side before it is read."""
        assert self.honest.rows, "the control is compared with the honest pass"
        return self._send(CONTROL)

    def transports(self) -> set[str]:
        """Data planes that bytes came by, from the counter's label."""
        return {
            sample.labels["transport"]
            for engine in self.decode
            for sample in engine.metrics()
            if sample.name == BYTES_READ and sample.value > 0
        }

    def source_engines(self) -> set[str]:
        """Ids of the prefill engines that bytes came from, from the counter's label."""
        return {
            sample.labels["source_engine"]
            for engine in self.decode
            for sample in engine.metrics()
            if sample.name == BYTES_READ and sample.value > 0
        }

    def memory(self) -> dict[int, int]:
        """Resident bytes of every process of every engine."""
        sizes: dict[int, int] = {}
        for engine in self.engines:
            sizes |= processes.memory(engine)
        return sizes


@contextlib.contextmanager
def run_case(case: Case, reference: Reference, logs: Path) -> Iterator[Cluster]:
    """The case's engines, ready and warm, behind a proxy."""
    topology = case.parsed()
    trace = logs / "trace.jsonl"
    settings = {**demo.SHARED_CORES, "transport": case.transport}
    if case.keyed:
        settings["control_key_file"] = str(key_file(logs / "control.key"))
    specs = []
    for role, shape in (("prefill", topology.prefill), ("decode", topology.decode)):
        for index in range(shape.instances):
            specs.append(
                EngineSpec(
                    name=f"{role}{index}",
                    model=reference.model,
                    role="prefill" if role == "prefill" else "decode",
                    dp=shape.dp,
                    tp=shape.tp,
                    pp=shape.pp,
                    kv_transfer_config=connector_config(
                        "prefill" if role == "prefill" else "decode", settings
                    ),
                    flags=demo.ANSWER_FLAGS,
                    env={demo.FAULT_ENV: f"{demo.FAULT_FLIP}:{CONTROL}"}
                    if role == "prefill"
                    else {demo.TRACE_ENV: str(trace)},
                )
            )
    begun = time.monotonic()
    with running(specs, logs) as engines:
        demo.warm_up(engines)
        ready_s = time.monotonic() - begun
        count = topology.prefill.instances
        prefill, decode = engines[:count], engines[count:]
        with demo.proxy(prefill, decode, "proxy", logs) as port:
            yield Cluster(case, reference, prefill, decode, port, trace, ready_s)


def key_file(path: Path) -> Path:
    """A file with a key that no other has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32) + "\n", encoding="utf-8")
    return path


def short_prompts(reference: Reference, count: int, seed: int) -> list[int]:
    """Indices of prompts to send in a row, in an order that the seed gives."""
    draw = random.Random(seed)
    return [draw.randrange(len(reference.prompts)) for _ in range(count)]
