"""Writes the generated pages of ``docs/`` from the code.

``configuration.md`` and ``metrics.md`` come from the tables of the Python package, ``errors.md``
from the Rust sources, ``cli.md`` from the executables' own help.
``python tools/gen_docs.py`` writes them, ``--check`` only says whether they are current (exit 1 if
not). Needs no vLLM; ``cli.md`` needs the executables, which an install of the package brings.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cli_page
import errors_page

ROOT = Path(__file__).resolve().parent.parent
MADE_BY = "<!-- Written by tools/gen_docs.py from the code. Do not edit. -->"
UNITS = {"seconds": "s", "ms": "ms"}


def table_module(name: str) -> ModuleType:
    """A module of the package by its file, so that the package itself is not imported."""
    path = ROOT / "python" / "hetero_kv" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_docs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cell(text: str) -> str:
    """Text that stays within its column."""
    return text.replace("|", "\\|")


def values_of(setting: Any) -> str:
    """What a key takes."""
    if setting.kind == "choice":
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    if setting.kind == "bool":
        return "`true`, `false`"
    if setting.kind == "ports":
        return "`FIRST-LAST`"
    if setting.kind == "addresses":
        return "list of `HOST:PORT`"
    if setting.kind in ("text", "name", "url", "path"):
        return "text"
    if setting.kind == "int":
        return f"{setting.low:.0f} to {setting.high:.0f}"
    return f"{setting.low:g} to {setting.high:g} {UNITS[setting.kind]}"


def default_of(setting: Any) -> str:
    """A key's default as JSON would write it."""
    if setting.kind == "bool":
        return f"`{str(setting.default).lower()}`"
    if setting.kind == "addresses":
        return "`[]`"
    if setting.default == "":
        return "empty"
    if isinstance(setting.default, str):
        return f"`{setting.default}`"
    return f"`{setting.default:g}`" if setting.kind != "int" else f"`{setting.default}`"


def configuration() -> str:
    """``docs/configuration.md``."""
    rows = [
        f"| `{s.name}` | {values_of(s)} | {default_of(s)} | {cell(s.meaning)} |"
        for s in table_module("config").SETTINGS
    ]
    return "\n".join(
        [
            MADE_BY,
            "# Settings of the connector",
            "",
            "They go into `kv_connector_extra_config` of vLLM's `--kv-transfer-config`:",
            "",
            "```json",
            '{"kv_connector": "HeteroKVConnector", "kv_role": "kv_producer",',
            ' "kv_connector_extra_config": {"port_range": "7000-7063", "lease_s": 60}}',
            "```",
            "",
            "vLLM's own keys beside it: `kv_role` is `kv_producer` for prefill, `kv_consumer` for "
            "decode, or `kv_both`; `kv_load_failure_policy` says what becomes of a request whose "
            "load failed, `fail` (default: an error) or `recompute` (its prompt is computed here).",
            "",
            "An unknown key, a wrong type or a value out of bounds stops the engine at start, with "
            "one error that lists every fault and the valid keys. Numbers and truth values may "
            "also be written as texts. Bounds are inclusive.",
            "",
            "| key | values | default | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            "Also: `peer_silence_s` is at least three times `heartbeat_s`, and `margin_ms` is "
            "below half of `lease_s`.",
            "",
        ]
    )


def metrics() -> str:
    """``docs/metrics.md``."""
    table = table_module("_metrics").METRICS
    rows = []
    for metric in table:
        name = f"{metric.name}_total" if metric.kind == "counter" else metric.name
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {cell(metric.meaning)} |")
    buckets = [
        f"Buckets of `{metric.name}`: {', '.join(f'{b:g}' for b in metric.buckets)}."
        for metric in table
        if metric.buckets
    ]
    return "\n".join(
        [
            MADE_BY,
            "# Metrics of the connector",
            "",
            "Served by each engine's API server on `/metrics`, beside vLLM's own, with vLLM's "
            "labels `model_name` and `engine` in front of those below. Ranks are added up. A "
            "series without labels of its own is there from the start, at 0; one with labels "
            "appears with its first event.",
            "",
            "| metric | kind | labels | meaning |",
            "|---|---|---|---|",
            *rows,
            "",
            *buckets,
            "",
        ]
    )


def main() -> int:
    """Writes or checks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail if not current")
    check = parser.parse_args().check
    stale = []
    try:
        pages = (
            ("configuration.md", configuration()),
            ("metrics.md", metrics()),
            ("errors.md", errors_page.page(ROOT, MADE_BY)),
            ("cli.md", cli_page.page(ROOT, MADE_BY)),
        )
    except (errors_page.PageError, cli_page.PageError) as error:
        print(f"gen_docs: {error}", file=sys.stderr)
        return 1
    for name, text in pages:
        path = ROOT / "docs" / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            stale.append(str(path.relative_to(ROOT)))
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not current: {', '.join(stale)}; run python tools/gen_docs.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
