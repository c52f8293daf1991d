"""Session: plain engines' answers. Module: one topology at a time. End: the matrix as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import matrix_report
from .processes import told_by
from .reference import Reference, ask_plain_engine


@pytest.fixture(scope="session")
def engine_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


class References:
    """The plain engines' answers, each model asked when first wanted."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._known: dict[str, Reference] = {}

    def of(self, model: str) -> Reference:
        if model not in self._known:
            self._known[model] = ask_plain_engine(model, self._logs / f"plain-{model}")
        return self._known[model]


@pytest.fixture(scope="session")
def references(engine_logs: Path) -> References:
    return References(engine_logs)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if matrix_report.RECORDS:
        terminalreporter.section("matrix")
        for line in [*matrix_report.table(), f"lines: {matrix_report.MATRIX_FILE}"]:
            terminalreporter.write_line(line)
    if matrix_report.MEASURES:
        terminalreporter.section("measured")
        for figures in matrix_report.MEASURES:
            terminalreporter.write_line(json.dumps(figures))
        terminalreporter.write_line(f"lines: {matrix_report.MEASURES_FILE}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Notes each verdict of a topology in its line of the matrix, and what the engines logged of a
    failure: the client saw no more than a 500."""
    report = yield
    given = getattr(item, "funcargs", {})
    cluster = given.get("cluster")
    if cluster is not None and call.when == "call":
        cluster.checks[getattr(item, "originalname", item.name)] = call.excinfo is None
    if report.failed and (running := cluster or given.get("site")) is not None:
        engines = running.engines
        for engine in engines.values() if isinstance(engines, dict) else engines:
            report.sections.append((f"told by {engine.name}", told_by(engine)))
    return report
