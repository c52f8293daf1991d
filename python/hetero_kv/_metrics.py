"""The connector's metrics, declared once. Needs neither vLLM nor prometheus_client, so that the
documentation can be made from it anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One metric: its name (without ``_total``), its kind, its meaning with the unit, and its
    labels after vLLM's own (``model_name``, ``engine``)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric(
        "hetero_kv_bytes_read",
        "counter",
        "Decode: bytes of KV read from a prefill rank and proven right, over all ranks. After 256 "
        "prefill engines in one process further ones are source_engine `other`.",
        ("source_engine", "source_dp", "source_tp", "transport"),
    ),
    Metric(
        "hetero_kv_transports_passed_over",
        "counter",
        "Decode: connections to a prefill rank that are of a worse transport than this one, with "
        "`transport: auto`. `reason`: `missing` (this rank cannot use it, the other can), "
        "`not_offered` (the other way round), `not_reached` (its probe failed).",
        ("transport", "reason"),
    ),
    Metric(
        "hetero_kv_bytes_planned",
        "counter",
        "Decode: bytes that the plans of finished loads move; equals the bytes read.",
    ),
    Metric(
        "hetero_kv_rank_loads",
        "counter",
        "Decode: loads finished without failure, counted per rank.",
    ),
    Metric(
        "hetero_kv_load_failures",
        "counter",
        "Decode: failed loads by reason and by the kv_transfer_params key or compatibility field "
        "at fault. Failures that every rank sees are counted once.",
        ("reason", "field"),
    ),
    Metric(
        "hetero_kv_load_seconds",
        "histogram",
        "Decode: seconds from the order to read to the last byte, per rank.",
        buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    ),
    Metric("hetero_kv_claims_gone", "counter", "Decode: claims and renewals answered Gone."),
    Metric(
        "hetero_kv_digest_mismatches",
        "counter",
        "Decode: requests whose prompt is not the one that was prefilled.",
    ),
    Metric(
        "hetero_kv_reconnects",
        "counter",
        "Decode: control connections made again to a prefill engine already paired with.",
    ),
    Metric(
        "hetero_kv_control_dials",
        "counter",
        "Decode: attempts to connect to a prefill engine's control listener, first ones included.",
    ),
    Metric(
        "hetero_kv_prefill_engines_paired",
        "gauge",
        "Decode: prefill engines whose control connection stands and whose layout is known; with "
        "the setting `connect` also before any request.",
    ),
    Metric(
        "hetero_kv_source_quarantines",
        "counter",
        "Decode: times a prefill rank was lost or out of reach and is avoided for a while.",
    ),
    Metric(
        "hetero_kv_sources_avoided",
        "gauge",
        "Decode: prefill ranks that are avoided where another holds the same heads.",
    ),
    Metric(
        "hetero_kv_unquiesced_loads",
        "gauge",
        "Decode: stopped loads whose blocks may still be written and are held back; not 0 for "
        "long is an incident.",
    ),
    Metric("hetero_kv_leases_granted", "counter", "Prefill: finished prompts held for decode."),
    Metric("hetero_kv_leases_read_out", "counter", "Prefill: leases read by a decode engine."),
    Metric("hetero_kv_leases_released", "counter", "Prefill: leases given back unread."),
    Metric("hetero_kv_leases_expired", "counter", "Prefill: leases whose time ran out."),
    Metric("hetero_kv_leases_alive", "gauge", "Prefill: prompts whose blocks are held."),
    Metric("hetero_kv_oldest_lease_seconds", "gauge", "Prefill: age of the oldest lease."),
    Metric(
        "hetero_kv_offers_refused",
        "counter",
        "Prefill: finished prompts that could not be held (transfer id in use, no lease slot).",
    ),
    Metric(
        "hetero_kv_peers_rejected",
        "counter",
        "Prefill: handshakes refused (another engine meant, incompatible caches, wire version).",
    ),
    Metric(
        "hetero_kv_free_blocks",
        "gauge",
        "Blocks of vLLM's KV cache that are free, as its block pool says.",
    ),
)
