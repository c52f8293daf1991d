"""What the Python peers of `transfer.py` share: memory, its bytes, the orders that come by line.

They speak as `cargo bench --bench transfer` does: one line of JSON each way.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
MASK = np.uint64(0x5BD1_E995)


def pattern(words: np.ndarray) -> np.ndarray:
    """What the holder has at each 8-byte word."""
    return ((words + np.uint64(1)) * MULTIPLIER) ^ MASK


class Memory:
    """An anonymous mapping, touched, as an array of 8-byte words."""

    def __init__(self, bytes_: int) -> None:
        self.bytes = bytes_
        self._map = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.words = np.frombuffer(self._map, dtype=np.uint64)
        self.words[:] = 0
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def fill(self) -> None:
        """With what a holder has."""
        self.words[:] = pattern(np.arange(self.bytes // 8, dtype=np.uint64))

    def require_exact(self, case: dict[str, Any]) -> None:
        """Raises where a run of the case is not what the holder has."""
        words = case["run_bytes"] // 8
        each = np.arange(words, dtype=np.uint64)
        for source, dest in case["list"]:
            found = self.words[dest // 8 : dest // 8 + words]
            if not np.array_equal(found, pattern(each + np.uint64(source // 8))):
                raise RuntimeError(f"wrong bytes at offset {dest} of the destination")


def hold(card: dict[str, Any]) -> None:
    """Announces the memory, and keeps it until the caller closes it."""
    print(json.dumps(card), flush=True)
    for _ in sys.stdin:
        pass


# Case, times, and the way where one is named.
CarryOut = Callable[[dict[str, Any], int, str], dict[str, float]]


def read(memory: Memory, carry_out: CarryOut) -> None:
    """Carries out orders, comparing every byte where one asks for it."""
    cases: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        # The first order of a case brings its list.
        cases |= {case["name"]: case for case in order.get("cases", ())}
        case, check = cases[order["case"]], order.get("check", False)
        if check:
            memory.words[:] = 0
        measured = carry_out(case, order.get("times", 1), order.get("way", ""))
        if check:
            memory.require_exact(case)
        print(json.dumps(measured), flush=True)
