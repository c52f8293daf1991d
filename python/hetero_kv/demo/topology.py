"""The demo's topology: shapes of the prefill and the decode side.

Grammar: ``[Nx]dp=D,tp=T:[Nx]dp=D,tp=T``, prefill before the colon.
"""

from __future__ import annotations

import dataclasses
import re

_SHAPE = re.compile(r"(?:(\d{1,4})x)?(dp=\d{1,4},tp=\d{1,4}|tp=\d{1,4},dp=\d{1,4})")

# More processes than this is surely a slip of the hand: each rank is a process of 0.7 GB.
RANKS_MAX = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """`instances` vLLM servers of `dp` engines with `tp` ranks each."""

    instances: int
    dp: int
    tp: int

    def __str__(self) -> str:
        count = f"{self.instances}x" if self.instances > 1 else ""
        return f"{count}dp={self.dp},tp={self.tp}"

    @property
    def ranks(self) -> int:
        return self.instances * self.dp * self.tp


@dataclasses.dataclass(frozen=True)
class Topology:
    prefill: Shape
    decode: Shape

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


def parse_shape(text: str) -> Shape:
    """Parses ``[Nx]dp=D,tp=T``. Raises `ValueError` that says what is wrong."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no shape; write [Nx]dp=D,tp=T, for example dp=1,tp=2")
    sizes = dict(pair.split("=") for pair in match[2].split(","))
    shape = Shape(int(match[1] or 1), int(sizes["dp"]), int(sizes["tp"]))
    if min(shape.instances, shape.dp, shape.tp) < 1:
        raise ValueError(f"{text!r}: every number must be at least 1")
    if shape.ranks > RANKS_MAX:
        raise ValueError(f"{text!r} has {shape.ranks} ranks; at most {RANKS_MAX}")
    return shape


def parse_topology(text: str) -> Topology:
    """Parses ``SHAPE:SHAPE``. Raises `ValueError` that says what is wrong."""
    sides = text.split(":")
    if len(sides) != 2:
        raise ValueError(
            f"{text!r} is no topology; write PREFILL:DECODE, for example dp=1,tp=2:dp=2,tp=1"
        )
    return Topology(parse_shape(sides[0]), parse_shape(sides[1]))
