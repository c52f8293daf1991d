"""``HeteroKVConnector``: vLLM's plug point. A facade over the scheduler or the worker side.

vLLM makes one object per scheduler and one per worker; the role says which. No hook raises for one
request: whatever is wrong with it becomes a load failure of that request, a log line and a counter.
What vLLM promises about these hooks is written, and tested, in ``docs/vllm-contract.md``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from hetero_kv import _core
from hetero_kv.config import Settings
from hetero_kv.engine import describe_engine, log_filter
from hetero_kv.metadata import HeteroKVMetadata
from hetero_kv.scheduler import SchedulerConnector
from hetero_kv.stats import HeteroKVPromMetrics, HeteroKVStats
from hetero_kv.worker import WorkerConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig


class HeteroKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves the KV of a prompt from the engine that prefilled it to the engine that decodes it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Checks the settings and the engine. Raises ``SettingsError`` or ``EngineError`` with
        every fault; vLLM then refuses to start."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = Settings(self._kv_transfer_config.kv_connector_extra_config)
        engine = describe_engine(vllm_config, kv_cache_config)
        _core.init_logging(log_filter())
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerConnector(vllm_config, settings, engine)
        else:
            self._worker = WorkerConnector(vllm_config, kv_cache_config, settings, engine)

    # === scheduler side ===

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_side.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler_side.start(metadata)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler_side.start({(0, tp_rank): card for tp_rank, card in metadata.items()})

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def on_new_request(self, request: Any) -> None:
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler_side.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        # True would mean "wait instead of preempting" and stall running requests behind a slow
        # reader. An engine with delayed frees keeps stepping without it.
        return False

    def reset_cache(self) -> bool | None:
        return self._scheduler_side.reset_cache()

    # === worker side ===

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker_side.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker_side.get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # vLLM may run the forward pass before it starts the loads that these orders name.
        assert isinstance(connector_metadata, HeteroKVMetadata)
        connector_metadata.received_at = time.monotonic()
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker_side.start_load_kv(self._get_connector_metadata(), forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        # A request is scheduled only after all of its loads are reported, so no layer of a running
        # request is ever waited for.
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        # Decode reads finished prompts; nothing is pushed layer by layer.
        return

    def wait_for_save(self) -> None:
        self._worker_side.end_of_forward(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker_side.get_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_side.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker_side.build_connector_worker_meta()

    # === both sides ===

    def get_kv_connector_stats(self) -> HeteroKVStats | None:
        side = self._scheduler or self._worker_side
        return side.get_kv_connector_stats()

    def shutdown(self) -> None:
        side = self._scheduler or self._worker_side
        side.shutdown()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # True strides are planned from, so any order of blocks, heads and tokens will do.
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HeteroKVStats | None:
        # A copy: vLLM adds later reports to what it gets, and others hold `data` too.
        stats = HeteroKVStats()
        return stats.aggregate(HeteroKVStats(data=data)) if data else stats

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> HeteroKVPromMetrics:
        return HeteroKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduler_side(self) -> SchedulerConnector:
        assert self._scheduler is not None, "a scheduler hook on the worker side"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerConnector:
        assert self._worker is not None, "a worker hook on the scheduler side"
        return self._worker
