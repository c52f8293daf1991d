"""Which hooks vLLM calls, in which order: the canonical traces of ``docs/vllm-contract.md``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm.v1.request import RequestStatus

from contract_engine import (
    PROMPT,
    SCHEDULER_HOOKS,
    WORKER_HOOKS,
    Engine,
    assert_nothing_held,
    drain,
    engines,
    prefill,
    run_until,
)
from hetero_kv.connector import HeteroKVConnector

pytestmark = pytest.mark.vllm

# Called in every step, whatever happens to any request.
EVERY_STEP = {"get_kv_connector_stats", "take_events", "has_pending_push_work"}


def of_request(engine: Engine, request_id: str) -> list[str]:
    """The hooks that carry this request, and no other."""
    return [name for name, of, _ in engine.trace if of == request_id]


def test_hooks_at_start_come_in_this_order(config_folder: Path) -> None:
    seen: list[str] = []

    def noted(name: str, hook: Any) -> Any:
        @functools.wraps(hook)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return hook(self, *args, **kwargs)

        return wrapped

    names = (
        "bind_kv_cache_manager",
        "bind_gpu_block_pool",
        "register_kv_caches",
        "get_handshake_metadata",
        "set_xfer_handshake_metadata_pp_aware",
        "get_finished_count",
    )
    patches = [
        mock.patch.object(HeteroKVConnector, name, noted(name, getattr(HeteroKVConnector, name)))
        for name in names
    ]
    for patch in patches:
        patch.start()
    try:
        with engines((config_folder, "kv_producer", {})):
            pass
    finally:
        for patch in patches:
            patch.stop()
    assert seen[:4] == [
        "bind_kv_cache_manager",
        "bind_gpu_block_pool",
        "register_kv_caches",
        "get_handshake_metadata",
    ]


def test_p_holds_blocks_from_finish_to_finished_sending(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {"settings": {"lease_s": 0.5}})) as (p,):
        params = prefill(p)
        assert params["do_remote_prefill"] is True
        assert of_request(p, "p0") == [
            "on_new_request",
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "request_finished_all_groups",
        ]
        ((delay, _),) = p.calls("request_finished_all_groups", "p0")
        assert delay is True
        # Finished, answered, and still holding its blocks and its place in vLLM's table.
        assert "p0" in p.scheduler.requests
        assert p.scheduler.requests["p0"].status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert p.free_blocks() == p.free_at_start - 7
        # An engine with nothing but a delayed free keeps stepping without `has_pending_push_work`.
        assert p.scheduler.has_finished_requests()
        assert not p.scheduler.has_unfinished_requests()
        held_until = len(p.reports)
        drain(p)
        sending = [r.finished_sending for r in p.reports[held_until:] if r.finished_sending]
        assert sending == [{"p0"}]
        assert_nothing_held(p)


def test_d_waits_in_empty_steps_then_computes_one_token(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {}), (config_folder, "kv_consumer", {"tp": 2})) as (
        p,
        d,
    ):
        params = prefill(p)
        d.add("d0", PROMPT, params, max_tokens=3)
        assert d.step()
        assert d.scheduler.requests["d0"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        assert "d0" not in d.scheduled
        run_until(lambda: "d0" in d.scheduled, p, d)
        assert all(worker.holds(PROMPT, d.blocks_of("d0")) for worker in d.workers)
        run_until(lambda: "d0" in d.outcomes, p, d)
        # Of the prompt one token was computed here, then two more were sampled.
        assert d.scheduled["d0"] == [1, 1, 1]
        assert d.calls("get_num_new_matched_tokens", "d0") == [(99, True)]
        assert d.calls("update_state_after_alloc", "d0") == [99, 0]
        first, second = (
            index
            for index, (name, of, _) in enumerate(d.trace)
            if name == "update_state_after_alloc" and of == "d0"
        )
        between = [name for name, _, _ in d.trace[first:second]]
        assert between.count("build_connector_meta") >= 1
        # The report of finished_recving lies between the two allocations.
        assert "update_connector_output" in between
        recving = [r.finished_recving for r in d.reports if r.finished_recving]
        assert recving == [{"d0"}]
        assert of_request(d, "d0") == [
            "on_new_request",
            "get_num_new_matched_tokens",
            "get_loaded_kv_cache_group_ids",
            "update_state_after_alloc",
            "update_state_after_alloc",
            "request_finished_all_groups",
        ]
        drain(p, d)
        assert_nothing_held(p, d)


@pytest.mark.parametrize("empty", [True, False])
def test_worker_hooks_of_one_step(config_folder: Path, empty: bool) -> None:
    with engines((config_folder, "kv_producer", {})) as (p,):
        p.record_worker()
        p.add("p0", PROMPT, {"do_remote_decode": True})
        if empty:
            run_until(lambda: "p0" in p.answers, p)
        p.trace.clear()
        p.step()
        names = [name for name, _, _ in p.trace if name in WORKER_HOOKS]
        layers = [] if empty else ["wait_for_layer_load", "save_kv_layer"] * 2
        start = names.index("bind_connector_metadata")
        stop = names.index("clear_connector_metadata") + 1
        assert names[start:stop] == [
            "bind_connector_metadata",
            *layers,
            # After the forward pass: our loads are asynchronous.
            "start_load_kv",
            "wait_for_save",
            "get_transfer_results",
            "get_finished",
            "get_block_ids_with_load_errors",
            "get_kv_connector_stats",
            "get_kv_connector_kv_cache_events",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ]


def test_scheduler_reads_stats_after_it_has_freed_blocks(config_folder: Path) -> None:
    with engines(
        (config_folder, "kv_producer", {"settings": {"lease_s": 0.5}, "log_stats": True})
    ) as (p,):
        prefill(p)
        drain(p)
        gauges = [stats["gauges"] for stats in p.stats if stats["gauges"]]
        free = [g['["hetero_kv_free_blocks"]'] for g in gauges if '["hetero_kv_free_blocks"]' in g]
        # The step that frees reports the count after it; no later step is needed to see it.
        assert free == [p.free_at_start - 7, p.free_at_start]
        assert gauges[-1]['["hetero_kv_leases_alive"]'] == 0


def test_hook_order_within_a_scheduler_step(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {})) as (p,):
        p.add("p0", PROMPT, {"do_remote_decode": True})
        p.trace.clear()
        p.step()
        assert [name for name, _, _ in p.trace if name in SCHEDULER_HOOKS] == [
            "get_num_new_matched_tokens",
            "update_state_after_alloc",
            "build_connector_meta",
            "request_finished_all_groups",
            "update_connector_output",
            "get_kv_connector_stats",
            "take_events",
        ]


def test_new_requests_are_announced_before_anything_is_scheduled(config_folder: Path) -> None:
    with engines((config_folder, "kv_consumer", {})) as (d,):
        d.trace.clear()
        d.add("d0", PROMPT)
        assert d.trace == [("on_new_request", "d0", None)]


def test_pending_block_frees_is_asked_only_when_blocks_run_out(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {"num_blocks": 16})) as (p,):
        assert p.connector.has_pending_block_frees() is False
        p.trace.clear()
        # 7 of 15 blocks are held for a reader that never comes; two requests grow into the rest.
        prefill(p, "p0", PROMPT)
        p.add("r0", list(range(300, 300 + 63)), max_tokens=24)
        p.add("r1", list(range(200, 200 + 47)), max_tokens=24)
        run_until(lambda: {"r0", "r1"} <= p.outcomes.keys(), p)
        # Both ended although they never had room at once: the younger one was preempted at once
        # instead of stalling behind p0's reader.
        assert "has_pending_block_frees" in p.hooks()
        assert "p0" in p.scheduler.requests
        assert p.scheduler.requests["p0"].is_finished()
        assert p.outcomes["r0"] == p.outcomes["r1"] == "length"
