"""What the connector reads of an engine, and the engines it refuses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed")

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)

from contract_engine import KV_HEADS, cache_config, make_config
from hetero_kv.engine import EngineError, describe_engine

pytestmark = pytest.mark.vllm

DROPPED = tuple(
    {field.name for field in dataclasses.fields(FullAttentionSpec)}
    - {field.name for field in dataclasses.fields(SlidingWindowSpec)}
    | {"sliding_window"}
)


@pytest.mark.parametrize(
    ("role", "producer", "consumer"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_an_engine_is_described(
    config_folder: Path, role: str, producer: bool, consumer: bool
) -> None:
    config = make_config(config_folder, role, tp=2, engine_id="e_dp3")
    # A dense DP rank is told size 1 and rank 0; only its index is true.
    config.parallel_config.data_parallel_index = 3
    engine = describe_engine(config, cache_config(8, 2))
    assert (engine.producer, engine.consumer) == (producer, consumer)
    assert (engine.engine_id, engine.dp_rank, engine.tp_size, engine.pp_size) == ("e_dp3", 3, 2, 1)
    assert (engine.kv_heads, engine.block_size, engine.lock_step) == (KV_HEADS, 16, False)


def test_data_parallelism_in_lock_step_is_seen(config_folder: Path) -> None:
    config = make_config(config_folder, "kv_both")
    config.parallel_config.data_parallel_size = 2
    assert describe_engine(config, cache_config(8, 1)).lock_step


def test_every_reason_for_a_refusal_is_listed(config_folder: Path) -> None:
    config: Any = make_config(config_folder, "kv_both")
    config.parallel_config.decode_context_parallel_size = 4
    config.parallel_config.prefill_context_parallel_size = 8
    config.kv_transfer_config.kv_role = "kv_neither"
    with pytest.raises(EngineError) as error:
        describe_engine(config, cache_config(8, 1, groups=2))
    assert [re.split(" is | has |: ", fault)[0] for fault in error.value.faults] == [
        "kv_role",
        "--decode-context-parallel-size",
        "--prefill-context-parallel-size",
        "group_kinds",
    ]
    for value in ("kv_neither", " 4;", " 8;", "2 KV cache groups"):
        assert value in str(error.value)


def changed_spec(**changes: Any) -> Any:
    cache: Any = cache_config(8, 1)
    for group in cache.kv_cache_groups:
        group.kv_cache_spec = dataclasses.replace(group.kv_cache_spec, **changes)
    return cache


def test_a_cache_that_drops_blocks_of_a_prompt_is_refused(config_folder: Path) -> None:
    # Behind the window the block table of a finished prompt holds vLLM's null block.
    config: Any = make_config(config_folder, "kv_both")
    cache: Any = cache_config(8, 1)
    group = cache.kv_cache_groups[0]
    full = group.kv_cache_spec
    group.kv_cache_spec = replace_as(full, SlidingWindowSpec, drop=DROPPED, sliding_window=32)
    named = r'group_kinds: group 0 \("model.layers.0.self_attn.attn"\) is "sliding_window"'
    with pytest.raises(EngineError, match=named):
        describe_engine(config, cache)
    group.kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"a": full, "b": group.kv_cache_spec}
    )
    with pytest.raises(EngineError, match='is "sliding_window"') as error:
        describe_engine(config, cache)
    assert len(error.value.faults) == 1
    # With the hybrid manager off vLLM keeps every block and notes the window only.
    assert describe_engine(config, changed_spec(sliding_window=32)).block_size == 16


def test_a_hybrid_model_is_refused_by_group_name_and_kind(config_folder: Path) -> None:
    """Sliding windows between layers of full attention, as vLLM's hybrid manager groups them."""
    config: Any = make_config(config_folder, "kv_both")
    cache: Any = cache_config(8, 1, groups=2)
    second = cache.kv_cache_groups[1]
    second.kv_cache_spec = replace_as(
        second.kv_cache_spec, SlidingWindowSpec, drop=DROPPED, sliding_window=32
    )
    with pytest.raises(EngineError) as error:
        describe_engine(config, cache)
    (fault,) = error.value.faults
    assert 'group 1 ("model.layers.1.self_attn.attn") is "sliding_window"' in fault
    assert "--disable-hybrid-kv-cache-manager" in fault


def test_several_groups_of_whole_prompts_are_refused_by_layer(config_folder: Path) -> None:
    config: Any = make_config(config_folder, "kv_both")
    with pytest.raises(EngineError) as error:
        describe_engine(config, cache_config(8, 1, groups=2))
    (fault,) = error.value.faults
    for words in ("2 KV cache groups", "full_attention of model.layers.1.self_attn.attn"):
        assert words in fault


@pytest.mark.parametrize("mode", [mode for mode in KVQuantMode if mode != KVQuantMode.NONE])
def test_a_cache_whose_scales_lie_beside_the_tokens_is_refused(
    config_folder: Path, mode: KVQuantMode
) -> None:
    config: Any = make_config(config_folder, "kv_both")
    config.cache_config.cache_dtype = "fp8_ds_mla"
    with pytest.raises(EngineError, match=f"--kv-cache-dtype fp8_ds_mla gives {mode.name};"):
        describe_engine(config, changed_spec(kv_quant_mode=mode))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_with_one_scale_a_layer_is_taken(config_folder: Path, dtype: str) -> None:
    config: Any = make_config(config_folder, "kv_both")
    config.cache_config.cache_dtype = dtype
    spec = changed_spec(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)
    assert describe_engine(config, spec).quantized
    assert not describe_engine(config, cache_config(8, 1)).quantized


def test_a_refused_engine_does_not_start(config_folder: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from hetero_kv.connector import HeteroKVConnector

    config = make_config(config_folder, "kv_both")
    for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
        with pytest.raises(EngineError, match="2 KV cache groups"):
            HeteroKVConnector(config, role, cache_config(8, 1, groups=2))
