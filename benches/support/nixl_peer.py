"""NIXL as one side of `transfer.py`: `hold` owns the memory, `read` reads it by order.

Speaks what `cargo bench --bench transfer` speaks: one line of JSON each way. Needs `nixl_cu12` on
the path; it imports on a host without CUDA.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
MASK = np.uint64(0x5BD1_E995)
# Between two looks at a transfer that takes milliseconds: looking all the time would count the
# looking. NIXL has no call that waits.
LOOK_INTERVAL_S = 50e-6
LOOK_ALL_THE_TIME_BYTES_MAX = 1 << 20


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


def agent(name: str) -> Any:
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def hold(mib: int) -> None:
    memory = Memory(mib << 20)
    memory.words[:] = pattern(np.arange(memory.bytes // 8, dtype=np.uint64))
    holder = agent("holder")
    registered = holder.register_memory([(memory.base, memory.bytes, 0, "")], "DRAM")
    card = {
        "pid": os.getpid(),
        "metadata": holder.get_agent_metadata().hex(),
        "base": memory.base,
        "bytes": memory.bytes,
    }
    print(json.dumps(card), flush=True)
    for _ in sys.stdin:
        pass
    holder.deregister_memory(registered)


class Reader:
    """The reading agent, with the lists of each case prepared once."""

    def __init__(self, card: dict[str, Any]) -> None:
        self._card = card
        self._memory = Memory(card["bytes"])
        self._agent = agent("reader")
        self._agent.register_memory([(self._memory.base, self._memory.bytes, 0, "")], "DRAM")
        self._peer = self._agent.add_remote_agent(bytes.fromhex(card["metadata"]))
        self._prepared: dict[str, tuple[Any, Any, np.ndarray]] = {}

    def _lists(self, case: dict[str, Any]) -> tuple[Any, Any, np.ndarray]:
        name = case["name"]
        if name not in self._prepared:
            size = case["run_bytes"]
            local = [(self._memory.base + dest, size, 0) for _, dest in case["list"]]
            remote = [(self._card["base"] + source, size, 0) for source, _ in case["list"]]
            self._prepared[name] = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM"),
                self._agent.prep_xfer_dlist(self._peer, remote, "DRAM"),
                np.arange(case["runs"], dtype=np.int32),
            )
        return self._prepared[name]

    def carry_out(self, case: dict[str, Any], times: int, check: bool) -> dict[str, float]:
        local, remote, indices = self._lists(case)
        if check:
            self._memory.words[:] = 0
        begun_s, spent_s = time.perf_counter(), time.process_time()
        posted_s = 0.0
        for _ in range(times):
            posted_s += self._read(local, remote, indices, case["bytes"])
        measured = {
            "wall_s": time.perf_counter() - begun_s,
            "cpu_s": time.process_time() - spent_s,
            "post_s": posted_s,
        }
        if check:
            self._require_exact(case)
        return measured

    def _read(self, local: Any, remote: Any, indices: np.ndarray, bytes_: int) -> float:
        begun_s = time.perf_counter()
        handle = self._agent.make_prepped_xfer("READ", local, indices, remote, indices)
        state = self._agent.transfer(handle)
        posted_s = time.perf_counter() - begun_s
        while state == "PROC":
            if bytes_ > LOOK_ALL_THE_TIME_BYTES_MAX:
                time.sleep(LOOK_INTERVAL_S)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")
        return posted_s

    def _require_exact(self, case: dict[str, Any]) -> None:
        words = case["run_bytes"] // 8
        each = np.arange(words, dtype=np.uint64)
        for source, dest in case["list"]:
            found = self._memory.words[dest // 8 : dest // 8 + words]
            if not np.array_equal(found, pattern(each + np.uint64(source // 8))):
                raise RuntimeError(f"wrong bytes at offset {dest} of the destination")


def read(card: dict[str, Any]) -> None:
    reader = Reader(card)
    cases: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        order = json.loads(line)
        # The first order of a case brings its list.
        cases |= {case["name"]: case for case in order.get("cases", ())}
        case = cases[order["case"]]
        measured = reader.carry_out(case, order.get("times", 1), order.get("check", False))
        print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]))
    else:
        read(json.loads(sys.argv[2]))
