"""Statistics: sums over ranks, vLLM's log line, and a real Prometheus exposition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed")

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)

from contract_engine import make_config
from hetero_kv._metrics import METRICS
from hetero_kv.connector import HeteroKVConnector
from hetero_kv.stats import SOURCE_ENGINES_MAX, HeteroKVStats, key

pytestmark = pytest.mark.vllm


def stats_of(reads: int, unquiesced: int | None = None) -> HeteroKVStats:
    """One rank's report."""
    stats = HeteroKVStats()
    stats.count("hetero_kv_bytes_read", reads, "engine", "0", "1", "tcp")
    stats.observe("hetero_kv_load_seconds", reads / 1000)
    if unquiesced is not None:
        stats.gauge("hetero_kv_unquiesced_loads", unquiesced)
    return stats


def test_ranks_add_up() -> None:
    total = stats_of(10, 1).aggregate(stats_of(20, 2)).aggregate(stats_of(30))
    assert total.data == {
        "counters": {key("hetero_kv_bytes_read", "engine", "0", "1", "tcp"): 60},
        "gauges": {key("hetero_kv_unquiesced_loads"): 3},
        "observations": {key("hetero_kv_load_seconds"): [0.01, 0.02, 0.03]},
    }


def test_nothing_is_empty_and_something_is_not() -> None:
    assert HeteroKVStats().is_empty()
    assert not stats_of(1).is_empty()
    stats = stats_of(1)
    stats.reset()
    assert stats.is_empty()


def test_what_vllm_hands_over_is_not_changed_by_later_reports() -> None:
    data = stats_of(10).data
    stats = HeteroKVConnector.build_kv_connector_stats(data)
    assert stats is not None
    stats.aggregate(stats_of(5))
    assert data == stats_of(10).data


def test_the_log_line_of_vllm(config_folder: Path) -> None:
    config = make_config(config_folder, "kv_consumer")
    log = KVConnectorLogging(config.kv_transfer_config)
    log.observe(stats_of(2**20).data)
    log.observe(stats_of(2**20).data)
    lines: list[str] = []
    log.log(lambda text, *args: lines.append(text % args))
    assert lines == [
        "KV Transfer metrics: Loads=2, MB read=2.0, Failed loads=0, "
        "Avg load (ms)=1048576.0, Max load (ms)=1048576.0"
    ]


def exposition(config_folder: Path, *reports: HeteroKVStats) -> dict[str, float]:
    """The series of ``/metrics`` after these reports."""
    registry = CollectorRegistry()

    def in_registry(cls: Any) -> Any:
        def make(**kwargs: Any) -> Any:
            return cls(registry=registry, **kwargs)

        return make

    class Prom(KVConnectorProm):
        _gauge_cls = staticmethod(in_registry(Gauge))
        _counter_cls = staticmethod(in_registry(Counter))
        _histogram_cls = staticmethod(in_registry(Histogram))

    config = make_config(config_folder, "kv_consumer")
    prom = Prom(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    for report in reports:
        prom.observe(report.data, 1)
    lines = generate_latest(registry).decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def test_every_metric_is_there_from_the_start(config_folder: Path) -> None:
    series = exposition(config_folder)
    for metric in METRICS:
        if metric.labels:
            continue
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        assert series[f'{metric.name}{suffix}{{engine="0",model_name="m"}}'] == 0


def test_counters_count_up_and_gauges_replace(config_folder: Path) -> None:
    series = exposition(config_folder, stats_of(10, 2), stats_of(5, 0))
    labels = 'engine="1",model_name="m"'
    sources = 'source_dp="0",source_engine="engine",source_tp="1",transport="tcp"'
    assert series[f"hetero_kv_bytes_read_total{{{labels},{sources}}}"] == 15
    assert series[f"hetero_kv_unquiesced_loads{{{labels}}}"] == 0
    assert series[f"hetero_kv_load_seconds_count{{{labels}}}"] == 2
    assert series['hetero_kv_load_seconds_bucket{engine="1",le="0.005",model_name="m"}'] == 1


def test_engines_started_over_and_over_do_not_grow_the_series(config_folder: Path) -> None:
    reports = []
    for number in range(SOURCE_ENGINES_MAX + 40):
        stats = HeteroKVStats()
        stats.count("hetero_kv_bytes_read", 1, f"start-{number}", "0", "1", "tcp")
        reports.append(stats)
    # One of the first goes on under its own name.
    reports.append(reports[0])
    series = {
        name: value
        for name, value in exposition(config_folder, *reports).items()
        if name.startswith("hetero_kv_bytes_read_total{")
    }
    assert len(series) == SOURCE_ENGINES_MAX + 1
    assert sum(series.values()) == SOURCE_ENGINES_MAX + 41
    [rest] = [value for name, value in series.items() if 'source_engine="other"' in name]
    assert rest == 40
    [first] = [value for name, value in series.items() if 'source_engine="start-0"' in name]
    assert first == 2


def test_real_prometheus_classes_take_the_metrics(config_folder: Path) -> None:
    before = set(REGISTRY._names_to_collectors)
    config = make_config(config_folder, "kv_consumer")
    try:
        KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"]})
        assert "hetero_kv_leases_alive" in REGISTRY._names_to_collectors
    finally:
        made = {
            REGISTRY._names_to_collectors[n] for n in set(REGISTRY._names_to_collectors) - before
        }
        for collector in made:
            REGISTRY.unregister(collector)


def test_names_follow_prometheus_rules() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.name.startswith("hetero_kv_")
        # The library appends it; here it would come twice.
        assert not metric.name.endswith("_total")
        assert metric.meaning.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")
