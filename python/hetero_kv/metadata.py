"""What vLLM carries between the two sides of the connector; all of it plain and picklable."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass
class HeteroKVHandshake(KVConnectorHandshakeMetadata):
    """One worker's announcement to its scheduler side, at start."""

    card: bytes
    """The worker's card: place, cache, endpoints (msgpack)."""
    fields: dict[str, str]
    """What must be equal in a pair; equal on all workers of an engine."""
    layer_names: tuple[str, ...]
    """Layers of this worker's pipeline stage."""
    scales: dict[str, str]
    """Scales of those layers' caches; none where the cache is not quantized."""


@dataclass
class HeteroKVMetadata(KVConnectorMetadata):
    """One step's orders, scheduler side to every worker."""

    orders: bytes
    """Encoded by the core."""
    received_at: float = 0.0
    """Worker side: when it came (``time.monotonic()``); times in the orders count from here."""
    flip_blocks: list[int] = field(default_factory=list)
    """Fault injection: blocks whose bytes the worker flips after the forward pass."""


@dataclass
class HeteroKVWorkerMeta(KVConnectorWorkerMetadata):
    """One step's failures, worker to scheduler side."""

    failed: dict[str, tuple[str, str, bool]]
    """Request id to reason, field, and whether the scheduler side ordered the failure itself."""
    lost: set[tuple[str, int]] = field(default_factory=set)
    """Request id and the tp rank of a source that could not be read for it."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> HeteroKVWorkerMeta:
        """Failures of several ranks: the first rank's reason stands for a request."""
        assert isinstance(other, HeteroKVWorkerMeta)
        return HeteroKVWorkerMeta({**other.failed, **self.failed}, self.lost | other.lost)
