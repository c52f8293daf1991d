"""Engines as the tests hold them: start, ask, stop, kill, and compare every byte."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from hetero_kv.config import Settings
from hetero_kv.demo.processes import stands_still

from . import engine_core, rank
from .caches import Image, Model, Moved, Place, Style

# Deadlines are for a hang only: two processors may be shared by everything else.
PATIENCE_S = 90.0

FAST = {
    "lease_s": 20,
    "grace_ms": 50,
    "margin_ms": 50,
    "sibling_linger_ms": 10,
    "heartbeat_s": 0.5,
    "peer_silence_s": 10,
    "claim_timeout_s": 10,
    "allow_ptracer": True,
}

FIELDS = {"model": "m", "dtype": "bfloat16"}


def context() -> Any:
    """Processes forked from a server that has imported the package and started nothing: quick, and
    proof that such a process can be forked."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload([engine_core.__name__, rank.__name__])
    return made


class EngineStartError(Exception):
    """The engine did not start; the text is its error."""


@dataclass
class Prefill:
    """A finished prefill as the router sees it, and what the oracle has to know."""

    engine: Engine
    request_id: str
    token_ids: list[int]
    params: dict[str, Any] | None
    refused: str | None
    blocks: list[int]
    generation: int


@dataclass
class Load:
    """One request's load as vLLM's scheduler sees it."""

    request_id: str
    ok: bool
    reports: list[dict[str, Any]]
    dest: list[int]
    aborted: bool
    at: float

    @property
    def reasons(self) -> set[str]:
        return {report["reason"] for report in self.reports}

    @property
    def text(self) -> str:
        return " | ".join(report["text"] or "" for report in self.reports)

    @property
    def fields(self) -> set[str]:
        return {report["field"] for report in self.reports}

    @property
    def bytes_read(self) -> int:
        return sum(s["bytes"] for report in self.reports for s in report["sources"])

    @property
    def sources(self) -> list[set[int]]:
        """Source ranks, per reading rank."""
        return [{s["tp"] for s in report["sources"]} for report in self.reports]


@dataclass
class Decode:
    """A request under way on a decode engine."""

    request_id: str
    prefill: Prefill
    computed: int
    at: float = field(default_factory=time.monotonic)


class Engine:
    """One engine: a scheduler process and a process for each rank."""

    def __init__(
        self,
        name: str,
        model: Model,
        style: Style,
        tp_size: int,
        *,
        producer: bool,
        settings: dict[str, Any] | None = None,
        fields: dict[str, str] | None = None,
        seed: int = 1,
        dp_rank: int = 0,
        pp_size: int = 1,
    ) -> None:
        self.name, self.model, self.style, self.seed = name, model, style, seed
        self.tp_size, self.pp_size = tp_size, pp_size
        places = [
            Place(tp_size, tp_rank, pp_size, pp_rank)
            for pp_rank in range(pp_size)
            for tp_rank in range(tp_size)
        ]
        self.producer = producer
        self.port: int | None = None
        self._events: dict[tuple[str, str], deque[tuple[float, tuple[Any, ...]]]] = {}
        self._next = 0
        self.images = [Image(model, style, place, seed + i) for i, place in enumerate(places)]
        core = Settings({**FAST, **(settings or {})}).for_core("127.0.0.1")
        engine = {
            "engine_id": name,
            "dp_rank": dp_rank,
            "dp_size": 1,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "block_size": model.block_size,
            "kv_heads": model.kv_heads,
            "producer": producer,
            "consumer": not producer,
        }
        ctx = context()
        self.ranks: list[BaseProcess] = []
        self._rank_pipes: list[Connection] = []
        engine_ends = []
        for place in places:
            engine_end, rank_end = ctx.Pipe()
            mine, theirs = ctx.Pipe()
            options = {
                "settings": core,
                "engine": engine,
                "tp_rank": place.tp_rank,
                "pp_rank": place.pp_rank,
            }
            process = ctx.Process(
                target=rank.main,
                args=(rank_end, theirs, options, model, style, seed),
                daemon=True,
            )
            process.start()
            rank_end.close()
            theirs.close()
            self.ranks.append(process)
            self._rank_pipes.append(mine)
            engine_ends.append(engine_end)
        self._pipe, theirs = ctx.Pipe()
        options = {
            "settings": core,
            "engine": engine,
            "fields": {
                **FIELDS,
                "kv_heads": str(model.kv_heads),
                "page_format": model.page_format,
                **(fields or {}),
            },
        }
        self.scheduler: BaseProcess = ctx.Process(
            target=engine_core.main,
            args=(theirs, engine_ends, options, model, style.num_blocks, seed),
            daemon=True,
        )
        self.scheduler.start()
        theirs.close()
        for end in engine_ends:
            end.close()

    def wait_started(self) -> Engine:
        """Raises :class:`EngineStartError` with the engine's own words."""
        kind, value = self._receive(PATIENCE_S)
        if kind == "failed":
            raise EngineStartError(value)
        self.port = value
        return self

    # === requests ===

    def new_id(self, prefix: str) -> str:
        self._next += 1
        return f"{self.name}-{prefix}{self._next}"

    def start_prefill(
        self, token_ids: list[int], params: dict[str, Any] | None = None
    ) -> tuple[str, list[int]]:
        request_id = self.new_id("p")
        self.ask("prefill", request_id, token_ids, params or {"do_remote_decode": True})
        return request_id, token_ids

    def finish_prefill(self, request_id: str, token_ids: list[int]) -> Prefill:
        _, (params, refused, blocks, generation) = self.wait_event("prefilled", request_id)
        return Prefill(self, request_id, token_ids, params, refused, blocks, generation)

    def prefill(self, token_ids: list[int], params: dict[str, Any] | None = None) -> Prefill:
        return self.finish_prefill(*self.start_prefill(token_ids, params))

    def decode(
        self,
        prefill: Prefill,
        *,
        computed: int = 0,
        hold: bool = False,
        params: Any = None,
        token_ids: list[int] | None = None,
    ) -> Decode:
        request = Decode(self.new_id("d"), prefill, computed)
        self.ask(
            "decode",
            request.request_id,
            token_ids or prefill.token_ids,
            prefill.params if params is None else params,
            computed,
            hold,
        )
        return request

    def loaded(self, request: Decode, timeout: float = PATIENCE_S) -> Load:
        """Waits for the load's end, and tells the oracle of it."""
        at, (ok, reports, dest, aborted) = self.wait_event("loaded", request.request_id, timeout)
        prefill = request.prefill
        moved = Moved(
            prefill.engine.model,
            prefill.engine.seed,
            prefill.generation,
            prefill.blocks,
            request.computed // self.model.block_size * self.model.block_size,
            len(prefill.token_ids) - 1,
        )
        for image in self.images:
            if ok:
                image.copy(moved, dest)
            elif not all(report["ordered"] for report in reports):
                image.forget(dest)
        return Load(request.request_id, ok, reports, dest, aborted, at)

    # === questions ===

    def ask(self, command: str, *arguments: Any) -> Any:
        """Carried out between two steps."""
        self._pipe.send((command, *arguments))
        deadline = time.monotonic() + PATIENCE_S
        while True:
            message = self._receive(deadline - time.monotonic())
            if message[0] == "reply":
                return message[1]
            self._store(message)

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = self.ask("figures")
        return figures

    def gauge(self, name: str) -> float:
        value: float = self.figures()["gauges"][name]
        return value

    def rank_ask(self, rank: int, command: str, *arguments: Any) -> Any:
        """Ranks count through the places of the first stage, then of the next."""
        pipe = self._rank_pipes[rank]
        pipe.send((command, *arguments))
        assert pipe.poll(PATIENCE_S), f"rank {rank} of {self.name} does not answer {command}"
        return pipe.recv()

    def rank_figures(self) -> list[dict[str, Any]]:
        return [self.rank_ask(r, "figures") for r in range(len(self.ranks))]

    def check_bytes(self) -> None:
        """Every byte of every rank is what the oracle says."""
        for r, image in enumerate(self.images):
            wrong = image.differences(self.rank_ask(r, "snapshot"))
            assert wrong is None, f"{self.name} rank {r}: {wrong}"

    def wait_event(
        self, kind: str, request_id: str, timeout: float = PATIENCE_S
    ) -> tuple[float, tuple[Any, ...]]:
        deadline = time.monotonic() + timeout
        queue = self._events.setdefault((kind, request_id), deque())
        while not queue:
            message = self._receive(deadline - time.monotonic(), f"{kind} of {request_id}")
            self._store(message)
        return queue.popleft()

    def has_event(self, kind: str, request_id: str) -> bool:
        while self._pipe.poll():
            self._store(self._pipe.recv())
        return bool(self._events.get((kind, request_id)))

    def wait_state(self, request: Decode, state: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (got := self.ask("state", request.request_id)) != state:
            assert time.monotonic() < deadline, f"{request.request_id} is {got}, not {state}"
            time.sleep(0.005)

    def wait_reading(self, tp_rank: int, jobs: int = 1) -> None:
        """Until so many reads of a rank are under way."""
        deadline = time.monotonic() + PATIENCE_S
        while self.rank_ask(tp_rank, "figures")["jobs_in_flight"] != jobs:
            assert time.monotonic() < deadline, f"{self.name} rank {tp_rank} does not read"
            time.sleep(0.005)

    def wait_idle(self, tp_rank: int) -> None:
        self.wait_reading(tp_rank, 0)

    def resume_rank(self, tp_rank: int) -> None:
        resume(self.ranks[tp_rank])

    def wait_gauge(self, name: str, value: float, timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while (got := self.gauge(name)) != value:
            assert time.monotonic() < deadline, f"{self.name}: {name} is {got}, not {value}"
            time.sleep(0.01)

    def _store(self, message: tuple[Any, ...]) -> None:
        assert message[0] == "event", message
        _, kind, request_id, at, rest = message
        self._events.setdefault((kind, request_id), deque()).append((at, rest))

    def _receive(self, timeout: float, what: str = "answer") -> tuple[Any, ...]:
        if not self._pipe.poll(max(timeout, 0)):
            states = {process.pid: _state(process) for process in [self.scheduler, *self.ranks]}
            raise TimeoutError(f"{self.name}: no {what} in time; its processes: {states}")
        message: tuple[Any, ...] = self._pipe.recv()
        return message

    # === life ===

    @contextmanager
    def stopped(self, *tp_ranks: int, scheduler: bool = False) -> Iterator[None]:
        """These processes get no processor time."""
        victims = [self.ranks[r] for r in tp_ranks] + ([self.scheduler] if scheduler else [])
        for victim in victims:
            stop(victim)
        try:
            yield
        finally:
            for victim in victims:
                resume(victim)

    def assert_clean(self) -> None:
        """Nothing is held, nothing is open, nothing was reported that nobody waits for."""
        if self.producer:
            self.wait_gauge("leases_alive", 0)
        else:
            self.wait_gauge("requests_open", 0)
            self.wait_gauge("transfers_open", 0)
        deadline = time.monotonic() + PATIENCE_S
        while (figures := self.figures())["free_blocks"] != self.style.num_blocks:
            assert time.monotonic() < deadline, f"{self.name}: {figures}"
            time.sleep(0.01)
        assert figures["violations"] == [], self.name
        for figure in self.rank_figures():
            assert figure.get("jobs_in_flight", 0) == 0
            assert figure.get("unquiesced", 0) == 0

    def alive(self) -> bool:
        return self.scheduler.is_alive() and all(r.is_alive() for r in self.ranks)

    def stop(self) -> None:
        """An orderly end."""
        if self.scheduler.is_alive():
            self.ask("stop")
        for r in range(len(self.ranks)):
            assert self.rank_ask(r, "shutdown")
        self.kill()

    def kill(self) -> None:
        for process in [self.scheduler, *self.ranks]:
            if process.is_alive():
                process.kill()
        for process in [self.scheduler, *self.ranks]:
            process.join(PATIENCE_S)
        for pipe in [self._pipe, *self._rank_pipes]:
            pipe.close()


def stop(process: BaseProcess) -> None:
    """Returns when it stands still."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while not stands_still(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _state(process: BaseProcess) -> str:
    """One letter, as ``proc(5)`` has it; ``gone`` where there is none."""
    try:
        with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def resume(process: BaseProcess) -> None:
    assert process.pid is not None
    # A killed one may be gone before its end is known here.
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGCONT)


def tokens(count: int, salt: int = 0) -> list[int]:
    """A prompt; another salt, another prompt."""
    return [(salt * 7919 + i * 31) % 50_000 for i in range(count)]


__all__ = [
    "FAST",
    "FIELDS",
    "PATIENCE_S",
    "Decode",
    "Engine",
    "EngineStartError",
    "Load",
    "Prefill",
    "resume",
    "stop",
    "tokens",
]
