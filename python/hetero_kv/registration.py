"""What an engine tells ``hetero-kv-proxy`` of itself; a thread of the Rust side sends it."""

from __future__ import annotations

import math
from typing import Any

from hetero_kv.config import Settings, SettingsError
from hetero_kv.engine import Engine


def registration(vllm_config: Any, settings: Settings, engine: Engine) -> dict[str, Any] | None:
    """For the Rust side; ``None`` where this scheduler does not register. Raises
    :class:`SettingsError` for a role that cannot be told."""
    if not settings["register_url"]:
        return None
    parallel = vllm_config.parallel_config
    registers, dp = ranks_behind_url(parallel, engine)
    role = settings["register_role"]
    if role == "auto":
        if engine.producer and engine.consumer:
            raise SettingsError(
                ["register_role: needed with kv_role kv_both, prefill or decode, not 'auto'"]
            )
        role = "prefill" if engine.producer else "decode"
    if not registers:
        return None
    model = vllm_config.model_config
    return {
        "proxy_url": settings["register_url"],
        "public_url": settings["register_public_url"],
        "role": role,
        "dp": settings["register_dp"] or dp,
        "interval_s": settings["register_interval_s"],
        "key_file": settings["register_key_file"] or None,
        # Adapters are names too, and come and go.
        "models": [] if vllm_config.lora_config else served_names(model),
        "kv": {
            "connector": "hetero",
            "mode": "read",
            "transport": settings["transport"],
            "model": served_names(model)[0],
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
            **({"lease_ms": lease_ms(settings)} if engine.producer else {}),
        },
    }


def lease_ms(settings: Settings) -> int:
    """How long blocks stay that decode was not seen to take: the proxy waits for so long before it
    says that the engine may be stopped."""
    lease_s, grace_ms = float(settings["lease_s"]), float(settings["grace_ms"])
    return math.ceil(lease_s * 1e3 + grace_ms)


def served_names(model: Any) -> list[str]:
    """The names by which clients ask for the model."""
    served = model.served_model_name
    names = list(served) if isinstance(served, list | tuple) else [served]
    return [str(name) for name in names if name] or [str(model.model)]


def ranks_behind_url(parallel: Any, engine: Engine) -> tuple[bool, int]:
    """Whether this scheduler is the one of its API server that registers, and how many DP ranks
    vLLM says are behind that server.

    One server has the schedulers of all ranks behind it, or those of its host (hybrid load
    balancing), or its own one (external).
    """
    if parallel.data_parallel_external_lb:
        return True, 1
    if parallel.data_parallel_hybrid_lb:
        return not parallel.data_parallel_rank_local, int(parallel.data_parallel_size_local)
    return engine.dp_rank == 0, engine.dp_size
