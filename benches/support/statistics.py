"""Medians of interleaved windows, and how far they can be trusted."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 4000


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def median_interval(values: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median; the same values give the same interval."""
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def shown(values: Sequence[float], form: str = ".4f") -> str:
    """`median [low, high]`."""
    low, high = median_interval(values)
    return f"{median(values):{form}} [{low:{form}}, {high:{form}}]"
