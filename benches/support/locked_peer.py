"""One of two Python processes that read each other's memory by our `process`: `hold MIB` and
`read CARD`. Its ways are `free`, and `held`: a thread keeps the interpreter lock for a second from
the moment that the reads are submitted.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from typing import Any

from hetero_kv import _core

from . import peer

HELD_S = 1.0
# On a busy host the thread that is to keep the lock may get a processor only after the reads.
TRIES_MAX = 5


def hold(mib: int) -> None:
    memory = peer.Memory(mib << 20)
    memory.fill()
    source = _core.MemorySource([(memory.base, memory.bytes)])
    peer.hold({"card": source.card().hex(), "bytes": memory.bytes})


class Keeper(threading.Thread):
    """Keeps the interpreter lock from the moment it is let."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        # Unlike `CDLL`, calls without giving up the lock.
        self._usleep = ctypes.PyDLL(None).usleep
        self.let = threading.Event()
        self.began_s = self.ended_s = 0.0

    def run(self) -> None:
        self.let.wait()
        self.began_s = time.perf_counter()
        self._usleep(int(HELD_S * 1e6))
        self.ended_s = time.perf_counter()


class Reader:
    """Our reader as the connector has it."""

    def __init__(self, card: dict[str, Any]) -> None:
        self._card = bytes.fromhex(card["card"])
        self.memory = peer.Memory(card["bytes"])
        self._reader = _core.MemoryReader([(self.memory.base, self.memory.bytes)], "process")
        self._runs: dict[str, list[tuple[int, int, int, int, int]]] = {}

    def carry_out(self, case: dict[str, Any], times: int, way: str) -> dict[str, float]:
        size = case["run_bytes"]
        if case["name"] not in self._runs:
            runs = [(0, source, 0, dest, size) for source, dest in case["list"]]
            self._runs[case["name"]] = runs
        runs = self._runs[case["name"]]
        for _ in range(TRIES_MAX):
            measured, held = self._read(runs, times, way == "held")
            if held:
                return measured
        raise RuntimeError("the interpreter lock was kept too late each time")

    def _read(
        self, runs: list[tuple[int, int, int, int, int]], times: int, held: bool
    ) -> tuple[dict[str, float], bool]:
        """What was measured, and whether it was what was asked for."""
        keeper = Keeper()
        if held:
            keeper.start()
        spent_s, begun_s = time.process_time(), time.perf_counter()
        for number in range(times):
            self._reader.submit(number, self._card, runs)
        submitted_s = time.perf_counter()
        if held:
            # From here on no Python runs until the keeper is done.
            keeper.let.set()
            keeper.join()
        took_s = self._ended(times)
        spent_s = time.process_time() - spent_s
        measured = {"wall_s": took_s, "cpu_s": spent_s, "post_s": submitted_s - begun_s}
        in_time = keeper.began_s - submitted_s < took_s / 4
        return measured, not held or (in_time and keeper.ended_s - keeper.began_s >= HELD_S)

    def _ended(self, count: int) -> float:
        """Seconds of the job that took longest, by the clock of the reading threads."""
        took_s, left = 0.0, count
        while left:
            self._reader.wait(60.0)
            for job in map(json.loads, self._reader.drain()):
                if job["kind"] is not None:
                    raise RuntimeError(f"a read failed: {job['text']}")
                took_s, left = max(took_s, job["ms"] / 1e3), left - 1
        return took_s


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]))
    else:
        reader = Reader(json.loads(sys.argv[2]))
        peer.read(reader.memory, reader.carry_out)
