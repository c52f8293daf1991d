"""Fixtures of the multi-process tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# Set before numpy is imported by the processes: they only move bytes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from .caches import PADDED, PLAIN, Model, Style
from .harness import Engine

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Makes engines; at the end of a test that passed, those still alive must hold nothing."""
    engines: list[Engine] = []

    def make(
        name: str,
        model: Model,
        tp_size: int = 1,
        *,
        producer: bool,
        style: Style | None = None,
        started: bool = True,
        **options: Any,
    ) -> Engine:
        engine = Engine(
            name,
            model,
            style or (PLAIN if producer else PADDED),
            tp_size,
            producer=producer,
            seed=options.pop("seed", 100 * (len(engines) + 1)),
            **options,
        )
        engines.append(engine)
        return engine.wait_started() if started else engine

    yield make
    for engine in engines:
        engine.kill()
