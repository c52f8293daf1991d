"""The demo's topology: shapes of the prefill and the decode side.

Grammar: ``[Nx]dp=D,tp=T[,pp=P]:[Nx]dp=D,tp=T[,pp=P]``, prefill before the colon.
"""

from __future__ import annotations

import dataclasses
import re

_SHAPE = re.compile(r"(?:(\d{1,4})x)?((?:dp|tp|pp)=\d{1,4}(?:,(?:dp|tp|pp)=\d{1,4}){1,2})")

# More processes than this is surely a slip of the hand: each rank is a process of 0.7 GB.
RANKS_MAX = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """`instances` vLLM servers of `dp` engines with `pp` stages of `tp` ranks each."""

    instances: int
    dp: int
    tp: int
    pp: int = 1

    def __str__(self) -> str:
        count = f"{self.instances}x" if self.instances > 1 else ""
        return f"{count}{self.engine}"

    @property
    def engine(self) -> str:
        """The shape of one instance."""
        stages = f",pp={self.pp}" if self.pp > 1 else ""
        return f"dp={self.dp},tp={self.tp}{stages}"

    @property
    def ranks(self) -> int:
        return self.instances * self.dp * self.tp * self.pp


@dataclasses.dataclass(frozen=True)
class Topology:
    prefill: Shape
    decode: Shape

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


def parse_shape(text: str) -> Shape:
    """Parses ``[Nx]dp=D,tp=T[,pp=P]``. Raises `ValueError` that says what is wrong."""
    match = _SHAPE.fullmatch(text.strip())
    pairs = [pair.split("=") for pair in match[2].split(",")] if match else []
    sizes = {name: int(size) for name, size in pairs}
    if match is None or len(sizes) < len(pairs) or not {"dp", "tp"} <= sizes.keys():
        raise ValueError(f"{text!r} is no shape; write [Nx]dp=D,tp=T[,pp=P], for example dp=1,tp=2")
    shape = Shape(int(match[1] or 1), sizes["dp"], sizes["tp"], sizes.get("pp", 1))
    if min(shape.instances, shape.dp, shape.tp, shape.pp) < 1:
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
