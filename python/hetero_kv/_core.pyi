"""Types of the extension module; ``make lint`` checks them against it (``mypy.stubtest``)."""

from typing import Any, final

__all__ = [
    "VERSION",
    "MemoryReader",
    "MemorySource",
    "MemoryWriter",
    "Scheduler",
    "Worker",
    "failure_reasons",
    "group_kinds",
    "init_logging",
    "mori_versions",
    "prompt_digest",
]

VERSION: str

def prompt_digest(token_ids: list[int], ingredients: list[tuple[str, bytes]]) -> str:
    """SHA-256 that names a prompt, in hexadecimal."""

def failure_reasons() -> list[str]:
    """Every value of the ``reason`` label of failed loads."""

def group_kinds(groups: list[tuple[str, str]]) -> str:
    """The compatibility field of KV cache groups, given as first layer and kind. Raises
    ``ValueError`` that names the group whose kind cannot be moved."""

def init_logging(filter: str) -> None:
    """Starts the log of our threads on standard error; raises ``ValueError`` for a bad filter."""

def mori_versions() -> tuple[str, str]:
    """Versions of ``amd-mori`` for the ``mori`` transport: from the first, below the second."""

@final
class MemorySource:
    """Memory (address and length) that a :class:`MemoryReader` of another process may read, and a
    :class:`MemoryWriter` write: the transports without an engine, for tests and benchmarks. The
    caller keeps it mapped until the object is gone. Raises ``OSError`` when it cannot be
    offered."""

    def __new__(
        cls,
        regions: list[tuple[int, int]],
        host: str = "127.0.0.1",
        tp_rank: int = 0,
        lease_slots: int = 64,
        mori: Any = None,
        notifications: bool = False,
    ) -> MemorySource: ...
    def card(self) -> bytes: ...
    def bump(self, slot: int, epoch: int) -> bool: ...
    def arrived(self, writer: bytes, uid: int) -> bool: ...
    def revoke(self) -> None: ...

@final
class MemoryReader:
    """Reads memory of other processes into this one's regions (address and length), which the
    caller keeps mapped until the object is gone. A run is source region, offset, own region,
    offset, bytes."""

    def __new__(
        cls,
        regions: list[tuple[int, int]],
        transport: str,
        host: str = "127.0.0.1",
        mori: Any = None,
        quiesce_timeout_s: float = 10.0,
    ) -> MemoryReader: ...
    def submit(
        self,
        id: int,
        card: bytes,
        runs: list[tuple[int, int, int, int, int]],
        slot: int = 0,
        epoch: int = 1,
        deadline_s: float = 60.0,
    ) -> None: ...
    def cancel(self, id: int) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def drain(self) -> list[str]: ...
    def figures(self) -> str: ...
    def shutdown(self, timeout_s: float) -> bool: ...

@final
class MemoryWriter:
    """Writes regions of this process (address and length), which the caller keeps mapped until the
    object is gone, into those of a :class:`MemorySource`, by ``mori``. A run is own region, offset,
    peer's region, offset, bytes. Answers are JSON."""

    def __new__(
        cls,
        regions: list[tuple[int, int]],
        mori: Any,
        host: str = "127.0.0.1",
        notifications: bool = True,
    ) -> MemoryWriter: ...
    def open(self, card: bytes, deadline_s: float) -> str: ...
    def descriptor(self) -> bytes: ...
    def post(
        self,
        ticket: int,
        runs: list[tuple[int, int, int, int, int]],
        slot: int = 0,
        epoch: int = 1,
    ) -> str: ...
    def poll(self, timeout_s: float) -> str: ...
    def quiesce(self, timeout_s: float) -> str: ...

@final
class Scheduler:
    """Scheduler side of one engine. Raises ``ValueError`` for bad options, ``OSError`` when the
    control listener cannot be bound."""

    def __new__(cls, options_json: str, cards: list[bytes]) -> Scheduler: ...
    @property
    def port(self) -> int | None: ...
    def new_request(
        self,
        request_id: str,
        params_json: str,
        token_ids: list[int],
        ingredients: list[tuple[str, bytes]],
        prompt_tokens: int,
    ) -> None: ...
    def matched_tokens(self, request_id: str, computed_tokens: int) -> int: ...
    def allocated(self, request_id: str, block_ids: list[int], external_tokens: int) -> None: ...
    def prefilled(
        self,
        request_id: str,
        params_json: str,
        token_ids: list[int],
        ingredients: list[tuple[str, bytes]],
        block_ids: list[list[int]],
        num_tokens: int,
    ) -> tuple[str | None, str | None]: ...
    def finished(self, request_id: str) -> None: ...
    def rejected(self, params_json: str) -> None: ...
    def source_lost(self, request_id: str, tp_rank: int) -> None: ...
    def received(self, request_id: str, failed: bool) -> None: ...
    def sent(self, request_id: str) -> None: ...
    def take_orders(self) -> bytes: ...
    def wait_for_orders(self, timeout_ms: float) -> None: ...
    def connect(self, host: str, port: int, engine_id: str, incarnation: str) -> None: ...
    def revoke_leases(self) -> None: ...
    def shutdown(self) -> None: ...
    def figures(self) -> str: ...

@final
class Worker:
    """Worker side of one rank. The caller keeps the memory of the cache's regions alive until the
    object is gone; ``mori`` is a ``hetero_kv.mori.Library``. Raises ``ValueError`` for bad options,
    ``OSError`` when it cannot start."""

    def __new__(cls, options_json: str, cache_json: str, mori: Any = None) -> Worker: ...
    def card(self) -> bytes: ...
    def step(self, orders: bytes, age_s: float) -> None: ...
    def wait(self, timeout_ms: float) -> None: ...
    def take_results(self) -> tuple[list[str], list[str]]: ...
    def figures(self) -> str: ...
    def shutdown(self, timeout_s: float) -> bool: ...
