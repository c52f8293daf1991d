"""Worker side: vLLM's tensors as regions into the core, and what it has finished back."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from hetero_kv import _core
from hetero_kv.config import Settings
from hetero_kv.engine import Engine, default_host
from hetero_kv.fault import flip
from hetero_kv.layout import (
    Cache,
    LayoutError,
    compat_fields,
    has_token_pages,
    page_format,
    read_cache,
    scale_texts,
    this_processor,
)
from hetero_kv.metadata import HeteroKVHandshake, HeteroKVMetadata, HeteroKVWorkerMeta
from hetero_kv.stats import HeteroKVStats
from hetero_kv.trace import Trace

logger = logging.getLogger("vllm.hetero_kv")

SHUTDOWN_TIMEOUT_S = 5.0


class WorkerConnector:
    """The worker half of the connector, in the process of one rank."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, settings: Settings, engine: Engine
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._engine = engine
        self._core: _core.Worker | None = None
        self._cache: Cache | None = None
        self._handshake: HeteroKVHandshake | None = None
        self._tp_rank = 0
        self._pp_rank = 0
        # In lock-step data parallelism a step is a collective over DP ranks: one that dawdles holds
        # up all of them.
        self._wait_ms = settings["lock_step_wait_ms" if engine.lock_step else "empty_step_wait_ms"]
        self._invalid_blocks: set[int] = set()
        self._failed: dict[str, tuple[str, str, bool]] = {}
        self._lost: set[tuple[str, int]] = set()
        self._stats = HeteroKVStats()
        self._unquiesced = 0
        self._passed_over: dict[tuple[str, str], int] = {}
        self._trace = Trace()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describes the cache and starts the rank's side. An engine cannot start without it."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        layers = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)
        held = {name: layers[name] for name in kv_caches if name in layers}
        backends = {layer.get_attn_backend().get_name() for layer in held.values()}
        cache = read_cache(
            kv_caches, self._kv_cache_config.num_blocks, not has_token_pages(backends)
        )
        scales = scale_texts(held, self._engine.quantized)
        if self._engine.quantized and scales.keys() != kv_caches.keys():
            raise LayoutError(
                f"layer {min(kv_caches.keys() - scales.keys())}: a quantized KV cache of a layer "
                "that vLLM does not know as one of attention"
            )
        self._tp_rank = get_tensor_model_parallel_rank()
        self._pp_rank = get_pp_group().rank_in_group
        options = {
            "settings": self._settings.for_core(default_host()),
            "engine": self._engine.for_core(),
            "tp_rank": self._tp_rank,
            "pp_rank": self._pp_rank,
        }
        self._cache = cache
        library = None
        if self._settings["transport"] == "mori":
            # Only here: the package and ROCm are somebody else's everywhere else.
            from hetero_kv import mori

            library = mori.Library()
        self._core = _core.Worker(json.dumps(options), cache.json, library)
        pages = page_format(backends, this_processor(), self._engine.block_size)
        self._handshake = HeteroKVHandshake(
            card=self._core.card(),
            fields=compat_fields(self._vllm_config, self._engine.group_kinds, cache, pages),
            layer_names=cache.layer_names,
            scales=scales,
        )

    def get_handshake_metadata(self) -> HeteroKVHandshake | None:
        """What the scheduler side announces of this rank."""
        return self._handshake

    def start_load_kv(self, metadata: HeteroKVMetadata, forward_context: Any) -> None:
        """Carries out the step's orders; nothing here waits for a peer. A step without tokens would
        come back at once and starve the peer it waits for, so it may wait a moment."""
        if self._core is None or not metadata.orders:
            return
        self._core.step(metadata.orders, time.monotonic() - metadata.received_at)
        if self._wait_ms and forward_context.attn_metadata is None:
            self._core.wait(self._wait_ms)

    def end_of_forward(self, metadata: HeteroKVMetadata) -> None:
        """The step's KV is computed."""
        if metadata.flip_blocks and self._cache is not None:
            flip(self._cache.tensors, metadata.flip_blocks)

    def get_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Ids reported once per rank: releases carried out, loads that nothing can write any
        more."""
        if self._core is None:
            return None, None
        sent, reports = self._core.take_results()
        received = set()
        for text in reports:
            report = json.loads(text)
            received.add(report["request_id"])
            self._account(report)
        return set(sent) or None, received or None

    def _account(self, report: dict[str, Any]) -> None:
        moved = sum(source["bytes"] for source in report["sources"])
        if report["reason"] is None:
            for source in report["sources"]:
                self._stats.count(
                    "hetero_kv_bytes_read",
                    source["bytes"],
                    report["engine"],
                    str(source["dp"]),
                    str(source["tp"]),
                    source["transport"],
                )
            self._stats.count("hetero_kv_bytes_planned", report["planned_bytes"])
            self._stats.count("hetero_kv_rank_loads", 1)
            self._stats.observe("hetero_kv_load_seconds", report["ms"] / 1e3)
        else:
            self._invalid_blocks.update(report["invalid_blocks"])
            self._failed[report["request_id"]] = (
                report["reason"],
                report["field"],
                report["ordered"],
            )
            if report["lost_tp_rank"] is not None:
                self._lost.add((report["request_id"], report["lost_tp_rank"]))
            logger.warning(
                "hetero_kv: request %s: load failed on tp rank %d, pp rank %d: %s: %s",
                report["request_id"],
                self._tp_rank,
                self._pp_rank,
                report["reason"],
                report["text"],
            )
        if self._trace:
            self._write_trace(report, moved)

    def _write_trace(self, report: dict[str, Any], moved: int) -> None:
        self._trace.write(
            "load",
            req_id=report["request_id"],
            transfer_id=report["transfer_id"],
            engine=report["engine"],
            reader_engine=self._engine.engine_id,
            dp_rank=self._engine.dp_rank,
            tp_rank=self._tp_rank,
            pp_rank=self._pp_rank,
            bytes=moved,
            planned_bytes=report["planned_bytes"],
            sources=report["sources"],
            ms=report["ms"],
            outcome=report["reason"] or "ok",
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, in the same step as their request's id."""
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> HeteroKVWorkerMeta | None:
        """Failures of this step, for the scheduler side."""
        if not self._failed:
            return None
        failed, self._failed = self._failed, {}
        lost, self._lost = self._lost, set()
        return HeteroKVWorkerMeta(failed, lost)

    def get_kv_connector_stats(self) -> HeteroKVStats | None:
        """Changes since the last call."""
        if self._core is not None and self._engine.consumer:
            figures = json.loads(self._core.figures())
            for transport, reason, count in figures.get("passed_over", ()):
                new = count - self._passed_over.get((transport, reason), 0)
                if new:
                    self._passed_over[transport, reason] = count
                    self._stats.count("hetero_kv_transports_passed_over", new, transport, reason)
            unquiesced = figures.get("unquiesced", 0)
            # The engine's gauge is the sum over its ranks in one step, so a rank that is not at 0
            # reports in every step, whether it changed or not.
            if unquiesced or self._unquiesced:
                self._unquiesced = unquiesced
                self._stats.gauge("hetero_kv_unquiesced_loads", unquiesced)
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, HeteroKVStats()
        return stats

    def shutdown(self) -> None:
        """Ends reads and serving while the cache is still mapped."""
        if self._core is not None:
            if not self._core.shutdown(SHUTDOWN_TIMEOUT_S):
                logger.error(
                    "hetero_kv: reads could not be stopped within %s s", SHUTDOWN_TIMEOUT_S
                )
            self._core = None
