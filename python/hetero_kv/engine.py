"""What the connector has to know of the engine it lives in, read from vLLM's configuration once."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import Any

from hetero_kv import _core
from hetero_kv.layout import total_kv_heads

logger = logging.getLogger("vllm.hetero_kv")

ROLES = {
    "kv_producer": (True, False),
    "kv_consumer": (False, True),
    "kv_both": (True, True),
}

# Quantized caches whose scales lie beside the layer and not beside the tokens: one for K and one
# for V, which a pair can compare.
SCALED_BY_LAYER = frozenset({"FP8_PER_TENSOR"})
SCALED_DTYPES = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})


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
    group_kinds: str
    """How the layers of each KV cache group attend, in the order of the groups."""
    quantized: bool
    """Whether cached values were divided by their layers' scales."""
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
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            flag = name.replace("_", "-")
            faults.append(f"--{flag} is {size}; only 1 is available in this version")
    groups = kv_cache_config.kv_cache_groups
    kinds, fault = _group_kinds(groups)
    if fault:
        faults.append(fault)
    for spec in _layer_specs(groups):
        fault = _quantization_fault(spec, str(vllm_config.cache_config.cache_dtype))
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
        group_kinds=kinds,
        quantized=any(spec.kv_quant_mode.name != "NONE" for spec in _layer_specs(groups)),
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


def _kind(spec: Any) -> str:
    """Such as `full_attention` for a ``FullAttentionSpec``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", type(spec).__name__.removesuffix("Spec"))
    return "_".join(words).lower()


def _group_kinds(groups: Any) -> tuple[str, str | None]:
    """The kinds of the groups, and what cannot be served of them."""
    named = []
    for group in groups:
        name = next(iter(group.layer_names), "no layer of this stage")
        kinds = {_kind(spec): None for spec in _layer_specs([group])}
        named += [(name, kind) for kind in kinds]
    try:
        kinds_text = _core.group_kinds(named)
    except ValueError as error:
        return "", (
            f"{error} (a sliding window can be kept whole with --disable-hybrid-kv-cache-manager)"
        )
    if len(groups) != 1:
        shown = ", ".join(f"{kind} of {name}" for name, kind in named)
        return kinds_text, (
            f"group_kinds: the model has {len(groups)} KV cache groups ({shown}); one is available "
            "in this version"
        )
    return kinds_text, None


def _quantization_fault(spec: Any, cache_dtype: str) -> str | None:
    mode = spec.kv_quant_mode.name
    if mode == "NONE" or (mode in SCALED_BY_LAYER and cache_dtype in SCALED_DTYPES):
        return None
    # Scales lie beside the tokens, where the tensors' strides do not tell.
    return (
        f"--kv-cache-dtype {cache_dtype} gives {mode}; of the quantized KV caches only "
        f"{', '.join(sorted(SCALED_DTYPES))} with one scale a layer are available in this version"
    )


def default_host() -> str:
    """vLLM's own address of this machine."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def log_filter() -> str:
    """What our threads log: ``HETERO_KV_LOG``, a filter such as ``info`` or ``debug``."""
    return os.environ.get("HETERO_KV_LOG", "info")
