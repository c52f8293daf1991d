"""Worker side: what it announces, accounts and reports; gauges of several ranks; shutdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from contract_engine import PROMPT, cache_config, drain, engines, make_config, prefill, run_until
from hetero_kv.connector import HeteroKVConnector
from hetero_kv.layout import this_processor
from hetero_kv.metadata import HeteroKVWorkerMeta
from hetero_kv.stats import HeteroKVStats, key

pytestmark = pytest.mark.vllm


def test_hooks_before_registration_do_nothing(config_folder: Path) -> None:
    config = make_config(config_folder, "kv_both")
    worker = HeteroKVConnector(config, KVConnectorRole.WORKER, cache_config(8, 1))
    assert worker.get_handshake_metadata() is None
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    assert worker.get_kv_connector_stats() is None
    worker.shutdown()
    worker.shutdown()


def test_a_scheduler_hook_on_the_worker_side_is_a_bug(config_folder: Path) -> None:
    config = make_config(config_folder, "kv_both")
    worker = HeteroKVConnector(config, KVConnectorRole.WORKER, cache_config(8, 1))
    with pytest.raises(AssertionError, match="scheduler hook on the worker side"):
        worker.request_finished(None, [])


def test_all_ranks_announce_equal_fields(config_folder: Path) -> None:
    with engines((config_folder, "kv_consumer", {"tp": 2})) as (d,):
        first, second = (worker.connector.get_handshake_metadata() for worker in d.workers)
        assert first.fields == second.fields
        assert first.card != second.card
        assert first.fields["kv_heads"] == "4"
        assert first.fields["kv_cache_dtype"] == "float32"
        assert first.fields["group_kinds"] == "full_attention"
        pages = first.fields["page_format"]
        assert pages == f"unknown on {this_processor()}, whole pages of 16 tokens"


def test_ranks_that_differ_are_refused_at_start_by_field(config_folder: Path) -> None:
    with engines((config_folder, "kv_consumer", {"tp": 2})) as (d,):
        cards = {(0, r): w.connector.get_handshake_metadata() for r, w in enumerate(d.workers)}
        cards[0, 1].fields = {**cards[0, 1].fields, "kv_cache_dtype": "uint8"}
        with pytest.raises(RuntimeError, match=r"\(0, 1\) differs .*kv_cache_dtype"):
            d.connector.set_xfer_handshake_metadata_pp_aware(cards)


def test_ranks_with_unlike_scales_are_refused_at_start_by_layer(config_folder: Path) -> None:
    with engines((config_folder, "kv_consumer", {"tp": 2})) as (d,):
        cards = {(0, r): w.connector.get_handshake_metadata() for r, w in enumerate(d.workers)}
        assert [card.scales for card in cards.values()] == [{}, {}]
        cards[0, 0].scales = {"a": "0.5/0.5", "b": "1.0/1.0"}
        cards[0, 1].scales = {"a": "0.5/0.5", "b": "1.0/2.0"}
        with pytest.raises(
            RuntimeError, match=r"layer b .*1\.0/2\.0 on worker .*\(0, 1\) and 1\.0/1"
        ):
            d.connector.set_xfer_handshake_metadata_pp_aware(cards)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "other"}, "model"),
        ({"kv_quantization": "fp8"}, "kv_quantization"),
        ({"page_format": "FLASH_ATTN"}, "page_format"),
    ],
)
def test_a_pair_of_unlike_caches_is_refused_by_field(
    config_folder: Path, change: dict[str, str], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hetero_kv.worker as module

    with engines((config_folder, "kv_producer", {})) as (p,):
        params = prefill(p)
        real = module.compat_fields
        monkeypatch.setattr(module, "compat_fields", lambda *a: {**real(*a), **change})
        with engines((config_folder, "kv_consumer", {})) as (d,):
            d.add("d0", PROMPT, params)
            run_until(lambda: "d0" in d.outcomes, p, d)
            assert d.outcomes["d0"] == "error"
            assert d.figures()["failures"] == [["pair_refused", field, 1]]
        p.connector.reset_cache()
        drain(p)


def test_a_load_is_accounted_on_each_rank(
    config_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"
    monkeypatch.setenv("HETERO_KV_TRACE", str(trace))
    with engines(
        (config_folder, "kv_producer", {}),
        (config_folder, "kv_consumer", {"tp": 2, "log_stats": True}),
    ) as (p, d):
        d.add("d0", PROMPT, prefill(p))
        drain(p, d)
        engine = p.config.kv_transfer_config.engine_id
        counters: dict[str, float] = {}
        for stats in d.stats:
            for series, amount in stats["counters"].items():
                counters[series] = counters.get(series, 0) + amount
        moved = counters[key("hetero_kv_bytes_read", engine, "0", "0", "process")]
        assert moved == counters[key("hetero_kv_bytes_planned")] > 0
        assert counters[key("hetero_kv_rank_loads")] == 2
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        loads = [line for line in lines if line["event"] == "load"]
        assert {line["tp_rank"] for line in loads} == {0, 1}
        assert {line["outcome"] for line in loads} == {"ok"}
        assert sum(line["bytes"] for line in loads) == moved


class Reader:
    """In the core's place: a number of loads that cannot be quiesced, which takes a kernel that
    does not return to produce."""

    unquiesced = 0

    def figures(self) -> str:
        return json.dumps({"unquiesced": self.unquiesced})


def test_the_gauge_of_unquiesced_loads_is_the_sum_over_ranks(config_folder: Path) -> None:
    config = make_config(config_folder, "kv_consumer", tp=2)
    workers = [
        HeteroKVConnector(config, KVConnectorRole.WORKER, cache_config(8, 2)) for _ in range(2)
    ]
    readers = [Reader(), Reader()]
    for worker, reader in zip(workers, readers, strict=True):
        side: Any = worker._worker
        side._core = reader

    def shown() -> int | None:
        total: HeteroKVStats | None = None
        for worker in workers:
            stats = worker.get_kv_connector_stats()
            if stats is not None:
                total = stats if total is None else total.aggregate(stats)
        return None if total is None else total.data["gauges"][key("hetero_kv_unquiesced_loads")]

    assert shown() is None
    readers[0].unquiesced = 1
    assert shown() == 1
    readers[1].unquiesced = 2
    # Rank 0 has not changed, and counts all the same.
    assert shown() == 3
    readers[0].unquiesced = 0
    assert shown() == 2
    assert shown() == 2
    readers[1].unquiesced = 0
    assert shown() == 0
    assert shown() is None


def test_failures_come_with_their_blocks_and_reasons_in_one_step(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {}), (config_folder, "kv_consumer", {"tp": 2})) as (
        p,
        d,
    ):
        params = prefill(p)
        seen: list[tuple[set[str], set[int], Any]] = []

        def look(outputs: list[Any]) -> list[Any]:
            for output in outputs:
                report = output.kv_connector_output
                if report is not None and report.finished_recving:
                    meta = report.kv_connector_worker_meta
                    seen.append((report.finished_recving, report.invalid_block_ids, meta))
            return outputs

        d.tamper = look
        d.add("d0", PROMPT, {**params, "lease_epoch": params["lease_epoch"] + 1})
        run_until(lambda: "d0" in d.outcomes, p, d)
        drain_all = [p, d]
        p.connector.reset_cache()
        drain(*drain_all)
        assert len(seen) == 2
        for ids, blocks, meta in seen:
            assert ids == {"d0"}
            assert len(blocks) == 7
            assert isinstance(meta, HeteroKVWorkerMeta)
            reason, _, ordered = meta.failed["d0"]
            assert (reason, ordered) == ("lease_gone", True)


def test_a_source_that_is_gone_is_told_to_the_scheduler_side(config_folder: Path) -> None:
    """From both workers through vLLM's aggregation, so that later loads avoid it."""
    tcp = {"settings": {"transport": "tcp"}}
    with engines(
        (config_folder, "kv_producer", tcp), (config_folder, "kv_consumer", {"tp": 2})
    ) as (
        p,
        d,
    ):
        params = prefill(p)
        p.workers[0].connector.shutdown()
        d.add("d0", PROMPT, params)
        run_until(lambda: "d0" in d.outcomes, d)
        core = d.connector._scheduler_side._core
        assert core is not None
        figures = json.loads(core.figures())
        # Two workers lost the same rank at once: that is one quarantine.
        assert figures["counters"]["quarantines"] == 1
        assert figures["gauges"]["sources_avoided"] == 1


def test_lost_sources_of_several_ranks_are_joined() -> None:
    first = HeteroKVWorkerMeta({"a": ("peer_lost", "", False)}, {("a", 1)})
    second = HeteroKVWorkerMeta({"b": ("peer_lost", "", False)}, {("b", 0)})
    joined = first.aggregate(second)
    assert joined.failed.keys() == {"a", "b"}
    assert joined.lost == {("a", 1), ("b", 0)}


def test_a_better_transport_that_was_passed_over_is_counted(config_folder: Path) -> None:
    with engines(
        (config_folder, "kv_producer", {"settings": {"transport": "tcp"}}),
        (config_folder, "kv_consumer", {"log_stats": True}),
    ) as (p, d):
        for number in range(2):
            d.add(f"d{number}", PROMPT, prefill(p, f"p{number}"))
            drain(p, d)
        series = key("hetero_kv_transports_passed_over", "process", "not_offered")
        # Per connection, of which there is one, and not per load.
        assert sum(stats["counters"].get(series, 0) for stats in d.stats) == 1
