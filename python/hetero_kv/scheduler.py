"""Scheduler side: vLLM's requests and blocks in plain values, into the core and back."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from vllm.v1.request import RequestStatus

from hetero_kv import _core
from hetero_kv.config import Settings
from hetero_kv.engine import Engine, default_host
from hetero_kv.fault import FLIP_SOURCE, FlipSource, fault, fault_mark
from hetero_kv.layout import kv_scales, model_layers
from hetero_kv.metadata import HeteroKVHandshake, HeteroKVMetadata
from hetero_kv.registration import registration
from hetero_kv.stats import HeteroKVStats
from hetero_kv.trace import Trace

logger = logging.getLogger("vllm.hetero_kv")

Result = TypeVar("Result")
Fallback = TypeVar("Fallback")

# Figures of the core that are metrics under another name.
COUNTERS = {
    "leases_granted": "hetero_kv_leases_granted",
    "leases_read_out": "hetero_kv_leases_read_out",
    "leases_released": "hetero_kv_leases_released",
    "leases_expired": "hetero_kv_leases_expired",
    "offers_refused": "hetero_kv_offers_refused",
    "peers_rejected": "hetero_kv_peers_rejected",
    "claims_gone": "hetero_kv_claims_gone",
    "digest_mismatches": "hetero_kv_digest_mismatches",
    "reconnects": "hetero_kv_reconnects",
    "quarantines": "hetero_kv_source_quarantines",
    "dials": "hetero_kv_control_dials",
}
GAUGES = {
    "leases_alive": "hetero_kv_leases_alive",
    "oldest_lease_s": "hetero_kv_oldest_lease_seconds",
    "sources_avoided": "hetero_kv_sources_avoided",
    "peers_ready": "hetero_kv_prefill_engines_paired",
}


def never_raises(
    fallback: Fallback,
) -> Callable[[Callable[..., Result]], Callable[..., Result | Fallback]]:
    """An exception in a scheduler hook ends the engine for every request; the request it was about
    is not worth that. ``fallback`` is the answer that makes vLLM compute by itself."""

    def wrap(hook: Callable[..., Result]) -> Callable[..., Result | Fallback]:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Result | Fallback:
            try:
                return hook(*args, **kwargs)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:
                # A panic in the extension is no ``Exception`` (pyo3's ``PanicException``).
                logger.exception(
                    "hetero_kv: %s failed; the request goes on without KV transfer", hook.__name__
                )
                return fallback

        return guarded

    return wrap


class SchedulerConnector:
    """The scheduler half of the connector, in the process of vLLM's scheduler."""

    def __init__(self, vllm_config: Any, settings: Settings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._registration = registration(vllm_config, settings, engine)
        self._core: _core.Scheduler | None = None
        self._kv_cache_manager: Any = None
        self._known: set[str] = set()
        self._failed: set[str] = set()
        self._failures: dict[tuple[str, str], int] = {}
        self._reported: dict[Any, float] = {}
        self._trace = Trace()
        self._flip = FlipSource(fault_mark()) if fault() == FLIP_SOURCE else None

    def bind(self, kv_cache_manager: Any) -> None:
        """Takes vLLM's cache manager, for its count of free blocks."""
        self._kv_cache_manager = kv_cache_manager

    def start(self, handshakes: dict[tuple[int, int], Any]) -> None:
        """Starts the control plane with the announcements of all workers, by (pp, tp) rank."""
        cards: list[HeteroKVHandshake] = [handshakes[rank] for rank in sorted(handshakes)]
        fields = cards[0].fields
        for rank, card in zip(sorted(handshakes), cards, strict=True):
            if card.fields != fields:
                unlike = {k for k in fields if card.fields.get(k) != fields[k]}
                raise RuntimeError(
                    f"hetero_kv: worker (pp, tp) {rank} differs from the first in {sorted(unlike)}"
                )
        spanning = {
            "layers": model_layers({rank: handshakes[rank].layer_names for rank in handshakes}),
            "kv_scales": kv_scales(_all_scales(handshakes)),
        }
        settings = self._settings.for_core(default_host())
        options = {
            "settings": settings,
            "engine": self._engine.for_core(),
            "fields": {**fields, **spanning},
            "registration": self._registration,
        }
        self._core = _core.Scheduler(json.dumps(options), [card.card for card in cards])
        if self._core.port is not None:
            logger.info(
                "hetero_kv: engine %s hands KV off, control listener %s port %d",
                self._engine.engine_id,
                settings["host"],
                self._core.port,
            )

    # === hooks ===

    @never_raises(None)
    def on_new_request(self, request: Any) -> None:
        """Starts the claim; vLLM has not queued the request yet."""
        params = request.kv_transfer_params
        if not params or self._core is None:
            return
        if not isinstance(params, dict):
            # `vllm_xargs` lets a client put anything here, and right after this hook vLLM calls
            # `.get` on it, which would end the engine.
            request.kv_transfer_params = None
            logger.warning(
                "hetero_kv: request %s: kv_transfer_params are %s and not an object; its prompt is "
                "computed here",
                request.request_id,
                type(params).__name__,
            )
            self._count_failure("bad_params", "*")
            return
        if params.get("do_remote_decode") and self._flip is not None:
            self._flip.add(request)
        if not params.get("do_remote_prefill") or getattr(request, "abort_immediately", False):
            # A request that the API server rejected comes with a prompt that is not its own, only
            # to be finished: `request_finished` gives its lease back.
            return
        if not self._engine.consumer:
            logger.warning(
                "hetero_kv: request %s was prefilled elsewhere, but this engine takes no KV over "
                "(kv_role); its prompt is computed here",
                request.request_id,
            )
            self._count_failure("bad_params", "kv_role")
            return
        self._core.new_request(
            request.request_id,
            _to_json(params),
            request.prompt_token_ids or [],
            _ingredients(request),
            request.num_prompt_tokens,
        )
        # Known only now: a request that could not be announced is given back when it finishes.
        self._known.add(request.request_id)

    @never_raises((0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens that come from outside, loaded asynchronously. Free of side effects."""
        if self._core is None or request.request_id not in self._known:
            return 0, False
        tokens = self._core.matched_tokens(request.request_id, num_computed_tokens)
        return tokens, tokens > 0

    @never_raises(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has blocks; called a second time, with 0, after the load."""
        if self._core is None or request.request_id not in self._known:
            return
        self._core.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)
        if num_external_tokens:
            self._trace.write(
                "allocated", req_id=request.request_id, external_tokens=num_external_tokens
            )

    def build_connector_meta(self, scheduler_output: Any) -> HeteroKVMetadata:
        """Orders of this step, for every worker."""
        if self._core is None:
            return HeteroKVMetadata(orders=b"")
        meta = HeteroKVMetadata(orders=self._core.take_orders())
        if self._flip is not None:
            meta.flip_blocks = self._flip.blocks(scheduler_output, self._kv_cache_manager)
        return meta

    @never_raises(None)
    def update_connector_output(self, output: Any) -> None:
        """What all workers have finished."""
        if self._core is None:
            return
        meta = output.kv_connector_worker_meta
        for request_id, (reason, field, ordered) in (meta.failed if meta else {}).items():
            if request_id not in self._failed:
                self._failed.add(request_id)
                if not ordered:
                    self._count_failure(reason, field)
        for request_id, tp_rank in sorted(meta.lost) if meta else ():
            self._core.source_lost(request_id, tp_rank)
        for request_id in output.finished_recving or ():
            failed = request_id in self._failed
            self._failed.discard(request_id)
            self._core.received(request_id, failed)
        for request_id in output.finished_sending or ():
            self._core.sent(request_id)

    @never_raises((False, None))
    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Prefill: holds the blocks and answers with params. Decode: ends what is under way."""
        params = request.kv_transfer_params
        if not params or self._core is None:
            return False, None
        if self._flip is not None:
            self._flip.discard(request.request_id)
        if request.request_id in self._known:
            self._known.discard(request.request_id)
            self._core.finished(request.request_id)
            return False, None
        if params.get("do_remote_decode"):
            return self._prefilled(request, block_ids)
        if params.get("do_remote_prefill") and self._engine.consumer:
            # Rejected or aborted in front of the scheduler, under an id it never saw.
            self._core.rejected(_to_json(params))
        return False, None

    def _prefilled(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        done = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        tokens = request.num_prompt_tokens
        if not done or request.num_computed_tokens < tokens:
            return False, None
        if not self._engine.producer:
            logger.warning(
                "hetero_kv: request %s is to be decoded elsewhere, but this engine hands no KV "
                "off (kv_role)",
                request.request_id,
            )
            return False, None
        blocks = -(-tokens // self._engine.block_size)
        assert self._core is not None
        answer, refused = self._core.prefilled(
            request.request_id,
            _to_json(request.kv_transfer_params),
            request.prompt_token_ids or [],
            _ingredients(request),
            [list(group[:blocks]) for group in block_ids],
            tokens,
        )
        if answer is None:
            logger.warning(
                "hetero_kv: request %s: its KV is not held: %s", request.request_id, refused
            )
            return False, None
        return True, json.loads(answer)

    def reset_cache(self) -> bool:
        """The weights changed, or somebody asked: KV held for others is of the past."""
        if self._core is not None:
            self._core.revoke_leases()
        return True

    # === statistics ===

    @never_raises(None)
    def get_kv_connector_stats(self) -> HeteroKVStats | None:
        """Changes since the last call. vLLM asks after it has freed this step's blocks."""
        if self._core is None:
            return None
        stats = HeteroKVStats()
        figures = json.loads(self._core.figures())
        for name, value in figures["counters"].items():
            if name in COUNTERS:
                self._count_up(stats, COUNTERS[name], value)
        for reason, field, value in figures["failures"]:
            self._count_up(stats, "hetero_kv_load_failures", value, reason, field)
        for (reason, field), value in self._failures.items():
            self._count_up(stats, "hetero_kv_load_failures", value, reason, field, source="worker")
        for name, value in figures["gauges"].items():
            if name in GAUGES:
                self._gauge(stats, GAUGES[name], value)
        if self._kv_cache_manager is not None:
            free = self._kv_cache_manager.block_pool.get_num_free_blocks()
            self._gauge(stats, "hetero_kv_free_blocks", free)
        return None if stats.is_empty() else stats

    def _count_failure(self, reason: str, field: str) -> None:
        self._failures[reason, field] = self._failures.get((reason, field), 0) + 1

    def _count_up(
        self, stats: HeteroKVStats, metric: str, value: float, *labels: str, source: str = "core"
    ) -> None:
        series = ("counter", source, metric, labels)
        change = value - self._reported.get(series, 0)
        if change > 0:
            self._reported[series] = value
            stats.count(metric, change, *labels)

    def _gauge(self, stats: HeteroKVStats, metric: str, value: float) -> None:
        series = ("gauge", metric)
        if self._reported.get(series) != value:
            self._reported[series] = value
            stats.gauge(metric, value)

    def shutdown(self) -> None:
        """Closes every connection."""
        if self._core is not None:
            self._core.revoke_leases()
            self._core.shutdown()
            self._core = None


def _all_scales(handshakes: dict[tuple[int, int], HeteroKVHandshake]) -> dict[str, str]:
    """The layers' scales over all stages; the ranks of one stage share a layer's scale."""
    scales: dict[str, str] = {}
    for rank, card in sorted(handshakes.items()):
        for layer, text in card.scales.items():
            if scales.setdefault(layer, text) != text:
                raise RuntimeError(
                    f"hetero_kv: layer {layer} has the KV scales {text} on worker (pp, tp) {rank} "
                    f"and {scales[layer]} on another"
                )
    return scales


def _to_json(params: Any) -> str:
    """As text for the core, which checks it. What JSON cannot say is for the core to refuse."""
    try:
        return json.dumps(params)
    except (TypeError, ValueError, RecursionError):
        return ""


def _ingredients(request: Any) -> list[tuple[str, bytes]]:
    """What shapes a prompt's KV besides its token ids, in a fixed order."""
    parts: list[tuple[str, bytes]] = []
    if request.lora_request is not None:
        parts.append(("lora", str(request.lora_request.lora_name).encode()))
    if request.cache_salt is not None:
        parts.append(("cache_salt", str(request.cache_salt).encode()))
    for feature in request.mm_features or ():
        place = feature.mm_position
        parts.append(("mm_hash", f"{feature.identifier}@{place.offset}+{place.length}".encode()))
    if request.prompt_is_token_ids is not None:
        # Which positions of a mixed prompt the embeddings stand for.
        parts.append(("prompt_is_token_ids", bytes(map(bool, request.prompt_is_token_ids))))
    if request.prompt_embeds is not None:
        import torch

        # As bytes: numpy has no bfloat16.
        data = request.prompt_embeds.detach().cpu().contiguous().view(-1).view(torch.uint8)
        parts.append(("prompt_embeds", hashlib.sha256(data.numpy().tobytes()).digest()))
    return parts
