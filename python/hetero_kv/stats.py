"""Statistics for vLLM: what its stat loggers print and its ``/metrics`` serve.

Worker and scheduler sides fill a :class:`HeteroKVStats` with the changes since their last report;
vLLM adds them up over ranks and hands them to :class:`HeteroKVPromMetrics` in the API server.
``docs/metrics.md`` is generated from :data:`METRICS`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hetero_kv._metrics import METRICS

SOURCE_ENGINES_MAX = 256
"""Prefill engines that have series of their own in one process; vLLM draws an engine id at each
start, so a decode engine that outlives many of them would grow without end. Later ones are one
series."""
SOURCE_ENGINES_REST = "other"

Key = str
"""A metric and its label values, as one JSON list: vLLM's transport takes texts as keys only."""


def key(metric: str, *labels: str) -> Key:
    """The key of one series."""
    return json.dumps([metric, *labels])


@dataclass
class HeteroKVStats(KVConnectorStats):
    """``counters`` add up, ``gauges`` replace, ``observations`` append."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}, "observations": {}}

    def count(self, metric: str, amount: float, *labels: str) -> None:
        """Adds to a counter."""
        series = key(metric, *labels)
        counters = self.data["counters"]
        counters[series] = counters.get(series, 0) + amount

    def gauge(self, metric: str, value: float, *labels: str) -> None:
        """Sets a gauge."""
        self.data["gauges"][key(metric, *labels)] = value

    def observe(self, metric: str, value: float) -> None:
        """Adds an observation to a histogram."""
        self.data["observations"].setdefault(key(metric), []).append(value)

    def aggregate(self, other: KVConnectorStats) -> HeteroKVStats:
        for series, amount in other.data["counters"].items():
            counters = self.data["counters"]
            counters[series] = counters.get(series, 0) + amount
        for series, value in other.data["gauges"].items():
            # Gauges of several ranks of one engine are parts of a sum; the scheduler side's own
            # come once.
            gauges = self.data["gauges"]
            gauges[series] = gauges[series] + value if series in gauges else value
        for series, values in other.data["observations"].items():
            self.data["observations"].setdefault(series, []).extend(values)
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """The line of vLLM's periodic log."""
        moved = self._sum("hetero_kv_bytes_read")
        loads = self.data["observations"].get(key("hetero_kv_load_seconds"), [])
        out: dict[str, int | float] = {
            "Loads": len(loads),
            "MB read": round(moved / 2**20, 3),
            "Failed loads": int(self._sum("hetero_kv_load_failures")),
        }
        if loads:
            out["Avg load (ms)"] = round(sum(loads) / len(loads) * 1e3, 3)
            out["Max load (ms)"] = round(max(loads) * 1e3, 3)
        return out

    def _sum(self, metric: str) -> float:
        counters: dict[Key, float] = self.data["counters"]
        return sum(v for series, v in counters.items() if json.loads(series)[0] == metric)


class HeteroKVPromMetrics(KVConnectorPromMetrics):
    """The metrics in vLLM's ``/metrics``, each with vLLM's own labels in front."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        classes: dict[Literal["counter", "gauge", "histogram"], Any] = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._source_engines: set[str] = set()
        self._engine_label = {
            metric.name: metric.labels.index("source_engine")
            for metric in METRICS
            if "source_engine" in metric.labels
        }
        for metric in METRICS:
            extra: dict[str, Any] = {}
            if metric.kind == "histogram":
                extra["buckets"] = metric.buckets
            if metric.kind == "gauge" and metric_types[Gauge] is Gauge:
                # API servers of one instance share their metrics through files.
                extra["multiprocess_mode"] = "mostrecent"
            self._metrics[metric.name] = classes[metric.kind](
                name=metric.name,
                documentation=metric.meaning,
                labelnames=[*labelnames, *metric.labels],
                **extra,
            )
        for metric in METRICS:
            if not metric.labels:
                # Series that exist from the start, at 0, so that a rate over them is never absent.
                for values in per_engine_labelvalues.values():
                    self._metrics[metric.name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for series, amount in transfer_stats_data.get("counters", {}).items():
            name, *labels = json.loads(series)
            if (at := self._engine_label.get(name)) is not None:
                labels[at] = self._bounded(labels[at])
            self._metrics[name].labels(*engine, *labels).inc(amount)
        for series, value in transfer_stats_data.get("gauges", {}).items():
            name, *labels = json.loads(series)
            self._metrics[name].labels(*engine, *labels).set(value)
        for series, values in transfer_stats_data.get("observations", {}).items():
            name, *labels = json.loads(series)
            for value in values:
                self._metrics[name].labels(*engine, *labels).observe(value)

    def _bounded(self, source_engine: str) -> str:
        if len(self._source_engines) < SOURCE_ENGINES_MAX:
            self._source_engines.add(source_engine)
        return source_engine if source_engine in self._source_engines else SOURCE_ENGINES_REST
