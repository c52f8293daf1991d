"""What the connector derives from, uses and calls of vLLM's, by the modules that define it.

``vllm_hooks.py`` looks each of these up in one version of vLLM; ``tests/vllm/test_hook_lists.py``
holds our code against this table too, so that a new use has to be entered here.
"""

from __future__ import annotations

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
METRICS = "vllm/distributed/kv_transfer/kv_connector/v1/metrics.py"
FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
CACHE_INTERFACE = "vllm/v1/kv_cache_interface.py"
PARALLEL_STATE = "vllm/distributed/parallel_state.py"
SCHEDULER_OUTPUT = "vllm/v1/core/sched/output.py"

# Classes the connector derives from: all of their methods are listed.
HOOK_CLASSES: dict[str, tuple[str, ...]] = {
    BASE: (
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorMetadata",
        "KVConnectorHandshakeMetadata",
        "KVConnectorWorkerMetadata",
    ),
    METRICS: ("KVConnectorStats", "KVConnectorPromMetrics"),
}

# Names the connector takes from objects of vLLM's, by the module and class that define them.
USES: dict[str, dict[str, tuple[str, ...]]] = {
    BASE: {
        "KVConnectorRole": ("SCHEDULER", "WORKER"),
        "KVConnectorBase_V1": ("_kv_transfer_config", "_kv_cache_config"),
    },
    FACTORY: {"KVConnectorFactory": ("register_connector",)},
    METRICS: {
        "KVConnectorStats": ("data",),
        "KVConnectorPromMetrics": (
            "_counter_cls",
            "_gauge_cls",
            "_histogram_cls",
            "per_engine_labelvalues",
        ),
    },
    "vllm/v1/outputs.py": {
        "KVConnectorOutput": (
            "finished_sending",
            "finished_recving",
            "kv_connector_worker_meta",
            "kv_connector_stats",
            "invalid_block_ids",
        )
    },
    "vllm/v1/request.py": {
        "Request": (
            "request_id",
            "kv_transfer_params",
            "abort_immediately",
            "prompt_token_ids",
            "prompt_is_token_ids",
            "prompt_embeds",
            "num_prompt_tokens",
            "num_computed_tokens",
            "lora_request",
            "cache_salt",
            "mm_features",
            "status",
        ),
        "RequestStatus": ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"),
    },
    "vllm/lora/request.py": {"LoRARequest": ("lora_name",)},
    "vllm/multimodal/inputs.py": {
        "MultiModalFeatureSpec": ("identifier", "mm_position"),
        "PlaceholderRange": ("offset", "length"),
    },
    SCHEDULER_OUTPUT: {
        "SchedulerOutput": (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "kv_connector_metadata",
        ),
        "NewRequestData": ("req_id", "num_computed_tokens"),
        "CachedRequestData": ("req_ids", "num_computed_tokens"),
    },
    "vllm/v1/core/kv_cache_manager.py": {
        "KVCacheManager": ("block_pool", "get_block_ids"),
        "KVCacheBlocks": ("get_block_ids",),
    },
    "vllm/v1/core/block_pool.py": {"BlockPool": ("get_num_free_blocks",)},
    CACHE_INTERFACE: {
        "KVCacheConfig": ("num_blocks", "kv_cache_groups", "transfer_group_ids"),
        "KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
        "FullAttentionSpec": ("block_size", "kv_quant_mode"),
        "MLAAttentionSpec": ("block_size", "kv_quant_mode"),
        "UniformTypeKVCacheSpecs": ("block_size", "kv_cache_specs"),
        "KVQuantMode": ("NONE",),
    },
    "vllm/config/vllm.py": {
        "VllmConfig": (
            "model_config",
            "cache_config",
            "parallel_config",
            "speculative_config",
            "kv_transfer_config",
            "lora_config",
        )
    },
    "vllm/config/parallel.py": {
        "ParallelConfig": (
            "data_parallel_index",
            "data_parallel_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_rank_local",
            "data_parallel_size_local",
        )
    },
    "vllm/config/kv_transfer.py": {
        "KVTransferConfig": ("kv_role", "engine_id", "kv_connector_extra_config")
    },
    "vllm/config/model.py": {
        "ModelConfig": (
            "model",
            "served_model_name",
            "revision",
            "dtype",
            "use_mla",
            "hf_text_config",
            "get_head_size",
            "get_total_num_kv_heads",
        )
    },
    "vllm/config/cache.py": {"CacheConfig": ("cache_dtype",)},
    "vllm/config/speculative.py": {"SpeculativeConfig": ("method",)},
    "vllm/forward_context.py": {"ForwardContext": ("attn_metadata",)},
    PARALLEL_STATE: {"GroupCoordinator": ("rank_in_group",)},
    "vllm/model_executor/layers/attention_layer_base.py": {
        "AttentionLayerBase": ("get_attn_backend",)
    },
    "vllm/v1/attention/backend.py": {"AttentionBackend": ("get_name",)},
}

FUNCTIONS: dict[str, tuple[str, ...]] = {
    PARALLEL_STATE: ("get_pp_group", "get_tensor_model_parallel_rank"),
    "vllm/config/vllm.py": ("get_layers_from_vllm_config",),
    "vllm/utils/network_utils.py": ("get_ip",),
}
