"""Checks that docs/other-proxies.md names only what is there: our flags and our metrics.

``python tests/check_names.py`` looks at the columns headed ``ours`` of its tables, at what stands
there in backticks. A flag has to be in docs/cli.md or docs/proxy.md; a metric (a name in a table
below the heading "Metrics") in docs/metrics.md or in the table of metrics of docs/proxy.md. Exit
status 1 with one line for each fault.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"

TICKS = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
METRIC = re.compile(r"[a-z][a-z0-9_]+")


def ours(page: str) -> Iterator[tuple[int, str, bool]]:
    """(line number, cell of the column ``ours``, whether it names metrics) of each row."""
    column, metrics = None, False
    for number, line in enumerate(page.splitlines(), start=1):
        if line.startswith("## "):
            metrics = line == "## Metrics"
        if not line.startswith("|"):
            column = None
            continue
        if set(line) <= set("|-: "):
            continue
        # A `|` inside a cell is written with a backslash.
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
        if column is None:
            column = cells.index("ours")
        else:
            yield number, cells[column], metrics


def section(page: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    return page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(page: str) -> set[str]:
    """What the first cells of table rows name."""
    return set(re.findall(r"^\| `([a-z0-9_]+)` \|", page, re.MULTILINE))


def faults(page: str, flags: set[str], metrics: set[str]) -> Iterator[str]:
    """What the page names and is not there."""
    found = 0
    for number, cell, of_metrics in ours(page):
        for name in TICKS.findall(cell):
            for flag in FLAG.findall(name):
                found += 1
                if flag not in flags:
                    yield f"line {number}: {flag} is no flag of ours"
            if of_metrics and METRIC.fullmatch(name):
                found += 1
                if name not in metrics:
                    yield f"line {number}: {name} is no metric of ours"
    if not found:
        yield "no names: have its columns other headings?"


def main() -> int:
    """Checks the page; the exit status."""
    text = {
        name: (DOCS / name).read_text(encoding="utf-8")
        for name in ("other-proxies.md", "proxy.md", "cli.md", "metrics.md")
    }
    flags = set(FLAG.findall(text["cli.md"] + text["proxy.md"]))
    metrics = rows(section(text["proxy.md"], "Metrics")) | rows(text["metrics.md"])
    wrong = list(faults(text["other-proxies.md"], flags, metrics))
    for line in wrong:
        print(f"docs/other-proxies.md: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
