"""How vLLM adds up the reports of ranks, what a wrong one does, and that ours are never wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from contract_engine import (
    PROMPT,
    assert_nothing_held,
    cache_config,
    drain,
    engines,
    make_config,
    prefill,
    run_until,
)
from hetero_kv.metadata import HeteroKVWorkerMeta
from hetero_kv.stats import HeteroKVStats, key

pytestmark = pytest.mark.vllm


def reporting(**output: Any) -> ModelRunnerOutput:
    """One rank's output of a step."""
    return ModelRunnerOutput(
        req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**output)
    )


def test_aggregator_counts_reports_and_not_ranks() -> None:
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate([reporting(finished_sending={"a"}), reporting()])
    assert first is not None
    assert first.kv_connector_output.finished_sending is None
    # The second report comes from the same rank; rank 1 has not finished, and nobody notices.
    second = aggregator.aggregate([reporting(finished_sending={"a"}), reporting()])
    assert second is not None
    assert second.kv_connector_output.finished_sending == {"a"}
    # Rank 1's own report then counts as the first of another round.
    aggregator.aggregate([reporting(), reporting(finished_sending={"a"})])
    assert aggregator._send_remaining_count == {"a": 1}


def test_aggregator_passes_block_ids_on_before_the_request_is_complete() -> None:
    aggregator = KVOutputAggregator(2)
    output = aggregator.aggregate(
        [reporting(finished_recving={"a"}, invalid_block_ids={3}), reporting()]
    )
    assert output is not None
    assert output.kv_connector_output.invalid_block_ids == {3}
    assert output.kv_connector_output.finished_recving is None


def test_aggregator_adds_up_stats_and_failures_of_ranks() -> None:
    def stats(amount: float) -> HeteroKVStats:
        made = HeteroKVStats()
        made.count("hetero_kv_rank_loads", amount)
        return made

    failed = [
        HeteroKVWorkerMeta({"a": ("transport", "", False)}),
        HeteroKVWorkerMeta({"a": ("cancelled", "", True), "b": ("fenced", "", False)}),
    ]
    output = KVOutputAggregator(2).aggregate(
        [
            reporting(kv_connector_stats=stats(amount), kv_connector_worker_meta=meta)
            for amount, meta in zip((1, 2), failed, strict=True)
        ]
    )
    assert output is not None
    report = output.kv_connector_output
    assert report.kv_connector_stats.data["counters"] == {key("hetero_kv_rank_loads"): 3}
    assert report.kv_connector_worker_meta.failed == {
        "a": ("transport", "", False),
        "b": ("fenced", "", False),
    }


def test_the_expected_count_is_the_number_of_ranks(config_folder: Path) -> None:
    with engines((config_folder, "kv_consumer", {"tp": 2})) as (d,):
        assert d.connector.get_finished_count() is None
        assert d.aggregator._expected_finished_count == 2


def test_a_duplicate_report_frees_blocks_under_the_other_rank(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {"tp": 2, "settings": {"lease_s": 3600}})) as (p,):
        prefill(p)
        assert p.free_blocks() == p.free_at_start - 7
        # No worker has released anything; rank 0 says so twice.
        reports = [KVConnectorOutput(finished_sending={"p0"}) for _ in range(2)]

        def twice(outputs: list[ModelRunnerOutput]) -> list[ModelRunnerOutput]:
            outputs[0].kv_connector_output = reports.pop() if reports else KVConnectorOutput()
            return outputs

        p.tamper = twice
        p.step()
        assert p.free_blocks() == p.free_at_start - 7
        p.step()
        assert p.free_blocks() == p.free_at_start
        p.tamper = None
        # What our own rank 1 reports later is a stray id for vLLM: the engine would end.
        p.connector._scheduler._core.revoke_leases()


@pytest.mark.parametrize("report", ["finished_sending", "finished_recving"])
def test_a_stray_id_ends_the_engine(config_folder: Path, report: str) -> None:
    with engines((config_folder, "kv_both", {})) as (engine,):
        engine.add("r0", PROMPT, max_tokens=8)
        engine.tamper = lambda outputs: [
            ModelRunnerOutput(
                req_ids=output.req_ids,
                req_id_to_index=output.req_id_to_index,
                sampled_token_ids=output.sampled_token_ids,
                kv_connector_output=KVConnectorOutput(**{report: {"never-seen"}}),
            )
            for output in outputs
        ]
        with pytest.raises(AssertionError):
            engine.step()


def test_finished_recving_of_a_running_request_ends_the_engine(config_folder: Path) -> None:
    with engines((config_folder, "kv_both", {})) as (engine,):
        engine.add("r0", PROMPT, max_tokens=8)
        engine.step()

        def stray(outputs: list[ModelRunnerOutput]) -> list[ModelRunnerOutput]:
            outputs[0].kv_connector_output = KVConnectorOutput(finished_recving={"r0"})
            return outputs

        engine.tamper = stray
        with pytest.raises(AssertionError):
            engine.step()


def test_block_ids_with_several_groups_raise(config_folder: Path) -> None:
    config = make_config(config_folder, "kv_consumer")
    config.cache_config.num_gpu_blocks = 64
    # Our connector refuses such an engine at start; vLLM's rule is why it has to.
    config.kv_transfer_config = None
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=cache_config(64, 1, groups=2),
        structured_output_manager=object(),
        block_size=16,
    )
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="failed_recving"):
        scheduler.update_from_output(step, reporting(invalid_block_ids={1}))


def test_an_aborted_load_keeps_its_blocks_until_finished_recving(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {}), (config_folder, "kv_consumer", {"tp": 2})) as (
        p,
        d,
    ):
        params = prefill(p)
        hold = [worker.connector.start_load_kv for worker in d.workers]
        orders: list[Any] = []
        for worker in d.workers:
            # The orders of each step are put aside instead of carried out.
            worker.connector.start_load_kv = lambda context, w=worker: orders.append(
                (w, w.connector._get_connector_metadata(), context)
            )
        d.add("d0", PROMPT, params)
        run_until(lambda: d.figures()["counters"]["loads_ordered"] == 1, p, d)
        d.step()
        assert d.scheduler.requests["d0"].status == RequestStatus.WAITING_FOR_REMOTE_KVS
        d.abort("d0")
        for _ in range(20):
            d.step()
        # The client left, vLLM answered it, and no block is free: a read may be under way.
        assert d.scheduler.requests["d0"].status == RequestStatus.FINISHED_ABORTED
        assert d.free_blocks() == d.free_at_start - 7
        for worker, resume in zip(d.workers, hold, strict=True):
            worker.connector.start_load_kv = resume
        for worker, metadata, context in orders:
            worker.connector._worker.start_load_kv(metadata, context)
        drain(p, d)
        recving = [r.finished_recving for r in d.reports if r.finished_recving]
        assert recving == [{"d0"}]
        assert_nothing_held(p, d)


def test_an_abort_between_finished_recving_and_the_next_step_frees_at_once(
    config_folder: Path,
) -> None:
    with engines((config_folder, "kv_producer", {}), (config_folder, "kv_consumer", {})) as (p, d):
        d.add("d0", PROMPT, prefill(p))
        run_until(lambda: bool(d.reports) and bool(d.reports[-1].finished_recving), p, d)
        d.abort("d0")
        assert d.free_blocks() == d.free_at_start
        drain(p, d)
        assert_nothing_held(p, d)
