"""What the connector has to know of the engine it lives in, read from vLLM's configuration once."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from hetero_kv.layout import total_kv_heads

logger = logging.getLogger("vllm.hetero_kv")

ROLES = {
    "kv_producer": (True, False),
    "kv_consumer": (False, True),
    "kv_both": (True, True),
}

# Kinds of cache whose block table keeps every block of the prompt. Kinds with a window, a chunk or
# a state put other things, or nothing, into some of a finished prompt's entries, and what is left
# in them on one side is not what the other side needs.
WHOLE_PROMPT_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})


class EngineError(ValueError):
    """An engine that this version cannot serve: every reason at once, each with its setting."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        lines = "".join(f"\n  - {fault}" for fault in faults)
        super().__init__(f"hetero_kv cannot serve this engine:{lines}")


@dataclass(frozen=True)
class Engine:
    """One engine: one scheduler and its workers."""

    engine_id: str
    dp_rank: int
    """vLLM's ``data_parallel_index``: ``data_parallel_rank`` is 0 on every dense DP rank."""
    dp_size: int
    """Data parallel ranks that vLLM tells of; 1 on every dense DP rank."""
    tp_size: int
    pp_size: int
    block_size: int
    """Tokens a block of the (only) KV cache group holds."""
    kv_heads: int
    """KV heads over all ranks; 0 for MLA."""
    producer: bool
    consumer: bool
    lock_step: bool
    """Steps are collectives over DP ranks (MoE), so no rank may dawdle in one."""

    def for_core(self) -> dict[str, Any]:
        """The fields that the Rust side takes."""
        return {
            "engine_id": self.engine_id,
            "dp_rank": self.dp_rank,
            "dp_size": self.dp_size,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "block_size": self.block_size,
            "kv_heads": self.kv_heads,
            "producer": self.producer,
            "consumer": self.consumer,
        }


def describe_engine(vllm_config: Any, kv_cache_config: Any) -> Engine:
    """Reads the engine, or raises :class:`EngineError` with everything that is not supported."""
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    faults = []
    if transfer.kv_role not in ROLES:
        faults.append(f"kv_role is {transfer.kv_role!r}; it must be one of {', '.join(ROLES)}")
    if parallel.pipeline_parallel_size != 1:
        faults.append(
            f"--pipeline-parallel-size is {parallel.pipeline_parallel_size}; pipeline stages are "
            "not available in this version"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            flag = name.replace("_", "-")
            faults.append(f"--{flag} is {size}; only 1 is available in this version")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        faults.append(
            f"the model has {len(groups)} KV cache groups ({kinds}); one is available in this "
            "version"
        )
    for spec in _layer_specs(groups):
        fault = _spec_fault(spec)
        if fault and fault not in faults:
            faults.append(fault)
    if faults:
        raise EngineError(faults)
    producer, consumer = ROLES[transfer.kv_role]
    return Engine(
        engine_id=str(transfer.engine_id),
        dp_rank=int(parallel.data_parallel_index),
        dp_size=int(parallel.data_parallel_size),
        tp_size=int(parallel.tensor_parallel_size),
        pp_size=int(parallel.pipeline_parallel_size),
        block_size=int(groups[0].kv_cache_spec.block_size),
        kv_heads=total_kv_heads(vllm_config.model_config),
        producer=producer,
        consumer=consumer,
        lock_step=parallel.data_parallel_size > 1,
    )


def _layer_specs(groups: Any) -> list[Any]:
    """The specs of all layers, also of those that vLLM joins into one of uniform type."""
    specs: list[Any] = []
    for group in groups:
        joined = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        specs.extend(joined.values() if joined else [group.kv_cache_spec])
    return specs


def _spec_fault(spec: Any) -> str | None:
    kind = type(spec).__name__
    if kind not in WHOLE_PROMPT_SPECS:
        return (
            f"the model has a KV cache of kind {kind}; {' and '.join(sorted(WHOLE_PROMPT_SPECS))} "
            "are available in this version (a sliding window can be kept whole with "
            "--disable-hybrid-kv-cache-manager)"
        )
    mode = spec.kv_quant_mode.name
    if mode != "NONE":
        # Scales may lie beside the tokens, where the tensors' strides do not tell.
        return (
            f"--kv-cache-dtype gives {mode}; a quantized KV cache is not available in this version"
        )
    return None


def default_host() -> str:
    """vLLM's own address of this machine."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def log_filter() -> str:
    """What our threads log: ``HETERO_KV_LOG``, a filter such as ``info`` or ``debug``."""
    return os.environ.get("HETERO_KV_LOG", "info")
