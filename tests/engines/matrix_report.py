"""What the tests say in the end: a JSON line and a table row for each topology, and what the tests
of faults measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .cluster import Cluster

FOLDER = Path(__file__).parents[2] / "target"
MATRIX_FILE = FOLDER / "matrix.jsonl"
MEASURES_FILE = FOLDER / "measures.jsonl"
RECORDS: list[dict[str, Any]] = []
MEASURES: list[dict[str, Any]] = []

COLUMNS = (
    ("model", 9), ("topology", 30), ("transport", 9), ("equal", 7), ("bytes moved", 12),
    ("planned", 12), ("computed", 8), ("control", 8), ("engines", 7), ("sources", 24),
    ("leases", 6), ("blocks", 6), ("growth KiB", 10), ("ready s", 7), ("failed", 6),
)  # fmt: skip


def record(cluster: Cluster) -> dict[str, Any]:
    """One topology's figures; what was not asked for is null."""
    honest = cluster.__dict__.get("honest")
    control = cluster.__dict__.get("control")
    out: dict[str, Any] = {
        "model": cluster.case.model,
        "topology": cluster.case.topology,
        "transport_setting": cluster.case.transport,
        "keyed": cluster.case.keyed,
        "transports": sorted(cluster.transports()),
        "source_engines": len(cluster.source_engines()),
        "ready_s": round(cluster.ready_s, 1),
        "rss_growth_bytes": cluster.growth_bytes,
        "checks": cluster.checks,
    }
    if honest is not None:
        moves = [row for row in honest.rows if row.moves]
        sources: Counter[str] = Counter()
        for row in honest.rows:
            sources.update(row.sources)
        out |= {
            "prompts": len(honest.rows),
            "tokens_equal": sum(row.equal for row in honest.rows),
            "prompts_that_move": len(moves),
            "bytes_moved": sum(row.moved_bytes for row in honest.rows),
            "bytes_planned": sum(row.planned_bytes for row in honest.rows),
            "bytes_counted": int(honest.counters.bytes_read),
            "tokens_external": int(honest.counters.external_tokens),
            "tokens_computed_on_decode": int(honest.counters.computed_tokens),
            "bytes_by_source": dict(sorted(sources.items())),
            "seconds": round(honest.seconds, 2),
        }
        if control is not None:
            changed = [
                b for a, b in zip(honest.rows, control.rows, strict=True) if a.moves and not b.equal
            ]
            out["control_changed"] = len(changed)
            out["control_bytes_moved"] = sum(row.moved_bytes for row in control.rows)
    held = cluster.prefill_blocks.read()
    out |= {"leases_alive": held.leases, "blocks_held": held.blocks, "cache_usage": held.usage}
    return out


def add(cluster: Cluster) -> None:
    """Writes one topology's line."""
    _write(MATRIX_FILE, RECORDS, record(cluster))


def measure(name: str, **figures: Any) -> None:
    """Writes what a test has measured, with the unit in each figure's name."""
    _write(MEASURES_FILE, MEASURES, {"measure": name, **figures})


def _write(path: Path, earlier: list[dict[str, Any]], line: dict[str, Any]) -> None:
    """Each file holds the lines of the last session that wrote any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if earlier else "w", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    earlier.append(line)


def table() -> list[str]:
    lines = ["  ".join(f"{name:>{width}}" for name, width in COLUMNS)]
    for line in RECORDS:
        growth = line["rss_growth_bytes"]
        cells = (
            line["model"],
            line["topology"],
            "+".join(line["transports"]) or "-",
            f"{line.get('tokens_equal', '-')}/{line.get('prompts', '-')}",
            str(line.get("bytes_moved", "-")),
            str(line.get("bytes_planned", "-")),
            str(line.get("tokens_computed_on_decode", "-")),
            f"{line.get('control_changed', '-')}/{line.get('prompts_that_move', '-')}",
            str(line["source_engines"]),
            " ".join(line.get("bytes_by_source", {})) or "-",
            str(line["leases_alive"]),
            str(line["blocks_held"]),
            "-" if growth is None else str(growth // 1024),
            f"{line['ready_s']:.0f}",
            ",".join(name for name, ok in line["checks"].items() if not ok) or "none",
        )
        lines.append(
            "  ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True))
        )
    return lines
