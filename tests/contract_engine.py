"""Engines for contract tests: vLLM's own Scheduler, aggregator and worker step, our connector.

What is real: ``VllmConfig`` (from a model folder), ``Scheduler``, ``KVCacheConfig``, the connector
in both roles, ``KVOutputAggregator``, ``KVConnectorModelRunnerMixin``, the control and data planes
over loopback, the cache in torch CPU tensors. What is not: the model. In its place a worker writes
for each scheduled token a number that names (layer, head, token, position), so that a test can tell
which bytes a decode engine holds.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

BLOCK_SIZE = 16
KV_HEADS = 4
HEAD_SIZE = 32
LAYERS = tuple(f"model.layers.{index}.self_attn.attn" for index in range(2))
# Loads on a shared machine jump; nothing here measures time.
DEADLINE_S = 60.0
SAMPLED_TOKEN = 7
PROMPT = list(range(5, 105))

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "num_hidden_layers": len(LAYERS),
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

SCHEDULER_HOOKS = (
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "get_finished_count",
    "set_xfer_handshake_metadata_pp_aware",
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "update_state_after_alloc",
    "get_external_cache_hit_sources",
    "build_connector_meta",
    "update_connector_output",
    "request_finished_all_groups",
    "request_finished",
    "has_pending_block_frees",
    "has_pending_push_work",
    "get_kv_connector_stats",
    "take_events",
    "reset_cache",
)
WORKER_HOOKS = (
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)


def write_model_folder(folder: Path) -> Path:
    """A folder that ``VllmConfig`` takes; it holds no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return folder


def make_config(
    model: Path,
    role: str,
    *,
    tp: int = 1,
    pp: int = 1,
    engine_id: str | None = None,
    policy: str = "fail",
    max_num_seqs: int = 16,
    settings: dict[str, Any] | None = None,
    **args: Any,
) -> Any:
    """vLLM's real configuration of one engine."""
    extra = {
        "host": "127.0.0.1",
        "sibling_linger_ms": 20,
        "grace_ms": 20,
        "margin_ms": 20,
        "empty_step_wait_ms": 2,
        **(settings or {}),
    }
    transfer = {
        "kv_connector": "HeteroKVConnector",
        "kv_connector_module_path": "hetero_kv.connector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
    if engine_id is not None:
        transfer["engine_id"] = engine_id
    engine_args = EngineArgs(
        **{
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK_SIZE,
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "distributed_executor_backend": "mp" if tp * pp > 1 else "uni",
            "async_scheduling": False,
            "kv_transfer_config": transfer,
            **args,
        }
    )
    return engine_args.create_engine_config()


def attention_spec(tp: int) -> FullAttentionSpec:
    """One rank's share of the cache of every layer."""
    return FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=max(1, KV_HEADS // tp),
        head_size=HEAD_SIZE,
        dtype=torch.float32,
    )


def cache_config(
    num_blocks: int, tp: int, groups: int = 1, layers: tuple[str, ...] = LAYERS
) -> KVCacheConfig:
    """The cache of one pipeline stage's ``layers`` as vLLM describes it; with several ``groups``
    the layers are dealt to them."""
    spec = attention_spec(tp)
    page = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=page * num_blocks * len(layers),
                layers=list(layers),
                layer_stride=page * num_blocks,
                block_stride=page,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(layers[g::groups]), spec) for g in range(groups)],
    )


def content(layer: int, heads: range, tokens: list[int], first: int) -> np.ndarray:
    """What a worker writes for ``tokens`` at positions from ``first``: ``[heads, tokens]``."""
    position = np.arange(first, first + len(tokens))
    token = np.asarray(tokens, dtype=np.int64)
    value = (token * 1024 + position) * 16 + layer * 8
    return (value[None, :] + np.asarray(list(heads))[:, None]).astype(np.float32)


class Worker:
    """One rank: the connector in the worker role and its cache."""

    def __init__(
        self, config: Any, num_blocks: int, tp: int, rank: int, pp: int = 1, stage: int = 0
    ) -> None:
        self._config = config
        # Global index by name, of the stage's own layers.
        self.layers = {name: i for i, name in enumerate(LAYERS) if i * pp // len(LAYERS) == stage}
        cache = cache_config(num_blocks, tp, layers=tuple(self.layers))
        held = max(1, KV_HEADS // tp)
        first = rank * KV_HEADS // tp
        self.heads = range(first, first + held)
        # All layers are views of one storage, as in vLLM, and not at its start.
        shape = (cache.num_blocks, held, BLOCK_SIZE, 2 * HEAD_SIZE)
        size = int(np.prod(shape))
        pool = torch.full((24 + len(self.layers) * size,), -1.0)
        self.caches = {
            name: pool[24 + at * size :][:size].view(shape) for at, name in enumerate(self.layers)
        }
        connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        self.connector: Any = connector
        # Ranks come from the process group; here the ranks share a process.
        pipeline = mock.Mock(rank_in_group=stage)
        with (
            mock.patch("vllm.distributed.get_tensor_model_parallel_rank", return_value=rank),
            mock.patch("vllm.distributed.get_pp_group", return_value=pipeline),
        ):
            self.connector.register_kv_caches(self.caches)
        self._tokens: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """One step as the model runner takes it, the model's place held by :func:`content`."""
        spans = self._admit(step)
        runner = KVConnectorModelRunnerMixin
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            if not spans:
                return runner.kv_connector_no_forward(step, self._config)
            with (
                set_forward_context(object(), self._config),
                runner.maybe_get_kv_connector_output(step) as output,
            ):
                for request_id, first, past in spans:
                    self._forward(request_id, first, past)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        ids = [request_id for request_id, _, _ in spans]
        sampled = [
            [SAMPLED_TOKEN] if past >= len(self._tokens[request_id]) else []
            for request_id, _, past in spans
        ]
        for request_id, tokens in zip(ids, sampled, strict=True):
            self._tokens[request_id] += tokens
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=output,
        )

    def _admit(self, step: SchedulerOutput) -> list[tuple[str, int, int]]:
        """Takes over new tokens and blocks; the spans of positions to compute."""
        for request_id in step.finished_req_ids:
            self._tokens.pop(request_id, None)
            self._blocks.pop(request_id, None)
        computed = {}
        for new in step.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids or [])
            self._blocks[new.req_id] = list(new.block_ids[0])
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self._tokens[request_id] = list(cached.all_token_ids[request_id])
                self._blocks[request_id] = list(blocks[0])
            elif blocks is not None:
                self._blocks[request_id] += blocks[0]
            computed[request_id] = cached.num_computed_tokens[index]
        return [
            (request_id, computed[request_id], computed[request_id] + count)
            for request_id, count in step.num_scheduled_tokens.items()
        ]

    def _forward(self, request_id: str, first: int, past: int) -> None:
        tokens = self._tokens[request_id][first:past]
        positions = np.arange(first, first + len(tokens))
        blocks = np.asarray(self._blocks[request_id])[positions // BLOCK_SIZE]
        for name, index in self.layers.items():
            self.connector.wait_for_layer_load(name)
            rows = torch.from_numpy(content(index, self.heads, tokens, first).T.copy())
            view = self.caches[name]
            view[torch.from_numpy(blocks), :, torch.from_numpy(positions % BLOCK_SIZE)] = rows[
                :, :, None
            ].expand(-1, -1, 2 * HEAD_SIZE)
            self.connector.save_kv_layer(name, view, None)

    def holds(self, tokens: list[int], blocks: list[int]) -> bool:
        """Whether ``blocks`` hold exactly what was computed for ``tokens``, in every layer."""
        positions = np.arange(len(tokens))
        table = torch.from_numpy(np.asarray(blocks)[positions // BLOCK_SIZE])
        rows = torch.from_numpy(positions % BLOCK_SIZE)
        for name, index in self.layers.items():
            wanted = torch.from_numpy(content(index, self.heads, tokens, 0).T.copy())
            found = self.caches[name][table, :, rows]
            if not torch.equal(found, wanted[:, :, None].expand_as(found)):
                return False
        return True


class Engine:
    """One engine: a Scheduler, its workers, and the loop of vLLM's ``EngineCore.step``."""

    def __init__(
        self,
        model: Path,
        role: str,
        *,
        tp: int = 1,
        pp: int = 1,
        num_blocks: int = 64,
        log_stats: bool = False,
        **options: Any,
    ) -> None:
        self.config = make_config(model, role, tp=tp, pp=pp, **options)
        self.config.cache_config.num_gpu_blocks = num_blocks
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.trace: list[tuple[Any, ...]] = []
        self.workers: list[Worker] = []
        # vLLM tells the scheduler's side of the first stage's layers only.
        first_stage = tuple(name for i, name in enumerate(LAYERS) if i * pp // len(LAYERS) == 0)
        cache = cache_config(num_blocks, tp, layers=first_stage)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_SIZE,
            log_stats=log_stats,
        )
        self.connector: Any = self.scheduler.connector
        self._record(self.connector, SCHEDULER_HOOKS)
        places = [(stage, rank) for stage in range(pp) for rank in range(tp)]
        self.workers = [
            Worker(self.config, num_blocks, tp, rank, pp, stage) for stage, rank in places
        ]
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {
                place: worker.connector.get_handshake_metadata()
                for place, worker in zip(places, self.workers, strict=True)
            }
        )
        world_size = self.config.parallel_config.world_size
        assert world_size == len(places)
        self.aggregator = KVOutputAggregator.from_connector(self.connector, world_size)
        self.free_at_start = self.free_blocks()
        self.answers: dict[str, dict[str, Any] | None] = {}
        self.outcomes: dict[str, str] = {}
        self.scheduled: dict[str, list[int]] = {}
        self.reports: list[KVConnectorOutput] = []
        self.stats: list[dict[str, Any]] = []
        # A test looks at, or changes, what each worker reports before it is aggregated.
        self.tamper: Callable[[list[ModelRunnerOutput]], list[ModelRunnerOutput]] | None = None

    def _record(self, connector: Any, hooks: Iterable[str]) -> None:
        def wrap(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                entry = [name, getattr(args[0], "request_id", None) if args else None, None]
                self.trace.append(tuple(entry))
                place = len(self.trace) - 1
                entry[2] = hook(*args, **kwargs)
                if name == "update_state_after_alloc":
                    entry[2] = args[2]
                self.trace[place] = tuple(entry)
                return entry[2] if name != "update_state_after_alloc" else None

            return recorded

        for name in hooks:
            setattr(connector, name, wrap(name, getattr(connector, name)))

    def record_worker(self, rank: int = 0) -> None:
        """Puts this rank's hooks into the trace too."""
        self._record(self.workers[rank].connector, WORKER_HOOKS)

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: dict[str, Any] | None = None,
        *,
        max_tokens: int = 1,
        abort_immediately: bool = False,
        **options: Any,
    ) -> Request:
        """What ``EngineCore.add_request`` does."""
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0.0,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            abort_immediately=abort_immediately,
            **options,
        )
        self.scheduler.add_request(request)
        if abort_immediately:
            self.abort(request_id)
        return request

    def abort(self, request_id: str) -> None:
        """The client left."""
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """One step as ``EngineCore.step`` takes it; False when there was nothing to do."""
        if not self.scheduler.has_requests():
            return False
        step = self.scheduler.schedule()
        for request_id, count in step.num_scheduled_tokens.items():
            self.scheduled.setdefault(request_id, []).append(count)
        # Between processes outputs are copies, and the aggregator writes into the first one.
        outputs = [copy.copy(worker.execute(step)) for worker in self.workers]
        if self.tamper is not None:
            outputs = self.tamper(outputs)
        output = self.aggregator.aggregate(outputs)
        assert output is not None
        if output.kv_connector_output is not None:
            self.reports.append(output.kv_connector_output)
        for core in self.scheduler.update_from_output(step, output).values():
            for result in core.outputs:
                if result.finish_reason is not None:
                    self.outcomes[result.request_id] = str(result.finish_reason)
                    self.answers[result.request_id] = result.kv_transfer_params
            if core.scheduler_stats is not None and core.scheduler_stats.kv_connector_stats:
                self.stats.append(core.scheduler_stats.kv_connector_stats)
        return True

    def free_blocks(self) -> int:
        """As vLLM's block pool counts them."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def blocks_of(self, request_id: str) -> list[int]:
        """The request's block table."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def figures(self) -> dict[str, Any]:
        """Our connector's counters and gauges on the scheduler side."""
        figures: dict[str, Any] = json.loads(self.connector._scheduler._core.figures())
        return figures

    def hooks(self, request_id: str | None = None) -> list[str]:
        """Names of the hooks called, in order; of one request, or all."""
        return [
            name for name, of, _ in self.trace if request_id is None or of in (request_id, None)
        ]

    def calls(self, hook: str, request_id: str) -> list[Any]:
        """Results of one hook (for ``update_state_after_alloc``: its number of tokens)."""
        return [value for name, of, value in self.trace if name == hook and of == request_id]

    def close(self) -> None:
        """As vLLM shuts down: scheduler, then workers."""
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.connector.shutdown()


def run_until(
    condition: Callable[[], bool], *engines: Engine, deadline_s: float = DEADLINE_S
) -> None:
    """Steps the engines in turn until ``condition``; fails with what is left if it never comes."""
    end = time.monotonic() + deadline_s
    while not condition():
        busy = [engine.step() for engine in engines]
        if condition():
            return
        if time.monotonic() > end:
            left = [sorted(engine.scheduler.requests) for engine in engines]
            raise AssertionError(f"nothing came of it in {deadline_s} s; requests left: {left}")
        if not any(busy):
            time.sleep(0.002)


def prefill(engine: Engine, request_id: str = "p0", prompt: list[int] | None = None) -> Any:
    """Prefills one prompt; the params of its answer."""
    engine.add(request_id, prompt or PROMPT, {"do_remote_decode": True})
    run_until(lambda: request_id in engine.answers, engine)
    return engine.answers[request_id]


def drain(*engines: Engine) -> None:
    """Steps until no engine has anything to do, no lease is alive and nothing is loading."""

    def idle(engine: Engine) -> bool:
        gauges = engine.figures()["gauges"]
        open_still = ("leases_alive", "requests_open", "transfers_open")
        return not engine.scheduler.has_requests() and not any(
            gauges.get(name) for name in open_still
        )

    run_until(lambda: all(idle(engine) for engine in engines), *engines)


def assert_nothing_held(*engines: Engine) -> None:
    """Free blocks back to the start, nothing remembered by vLLM or by us."""
    for engine in engines:
        assert engine.free_blocks() == engine.free_at_start
        assert not engine.scheduler.requests
        gauges = engine.figures()["gauges"]
        assert gauges.get("leases_alive", 0) == 0
        assert gauges.get("requests_open", 0) == 0
        assert gauges.get("transfers_open", 0) == 0
        assert not engine.aggregator._recv_remaining_count
        assert not engine.aggregator._send_remaining_count
        side = engine.connector._scheduler
        assert not side._known
        assert not side._failed


@contextlib.contextmanager
def engines(*specs: tuple[Any, ...]) -> Iterator[list[Engine]]:
    """Engines of ``(model, role, options)``, closed at the end."""
    started: list[Engine] = []
    try:
        for model, role, options in specs:
            started.append(Engine(model, role, **options))
        yield started
    finally:
        for engine in started:
            engine.close()
