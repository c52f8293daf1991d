"""One of two processes that read each other's memory by NIXL: `hold MIB` and `read CARD`.

Needs `nixl_cu12` on the path; it imports on a host without CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from . import peer

# Between two looks at a transfer that takes milliseconds: looking all the time would count the
# looking. NIXL has no call that waits.
LOOK_INTERVAL_S = 50e-6
LOOK_ALL_THE_TIME_BYTES_MAX = 1 << 20


def agent(name: str) -> Any:
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def hold(mib: int) -> None:
    memory = peer.Memory(mib << 20)
    memory.fill()
    holder = agent("holder")
    registered = holder.register_memory([(memory.base, memory.bytes, 0, "")], "DRAM")
    metadata = holder.get_agent_metadata().hex()
    card = {"pid": os.getpid(), "metadata": metadata, "base": memory.base, "bytes": memory.bytes}
    peer.hold(card)
    holder.deregister_memory(registered)


class Reader:
    """The reading agent, with the lists of each case prepared once."""

    def __init__(self, card: dict[str, Any]) -> None:
        self._card = card
        self.memory = peer.Memory(card["bytes"])
        self._agent = agent("reader")
        self._agent.register_memory([(self.memory.base, self.memory.bytes, 0, "")], "DRAM")
        self._peer = self._agent.add_remote_agent(bytes.fromhex(card["metadata"]))
        self._prepared: dict[str, tuple[Any, Any, np.ndarray]] = {}

    def _lists(self, case: dict[str, Any]) -> tuple[Any, Any, np.ndarray]:
        name = case["name"]
        if name not in self._prepared:
            size = case["run_bytes"]
            local = [(self.memory.base + dest, size, 0) for _, dest in case["list"]]
            remote = [(self._card["base"] + source, size, 0) for source, _ in case["list"]]
            self._prepared[name] = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM"),
                self._agent.prep_xfer_dlist(self._peer, remote, "DRAM"),
                np.arange(case["runs"], dtype=np.int32),
            )
        return self._prepared[name]

    def carry_out(self, case: dict[str, Any], times: int, _way: str) -> dict[str, float]:
        local, remote, indices = self._lists(case)
        begun_s, spent_s = time.perf_counter(), time.process_time()
        posted_s = 0.0
        for _ in range(times):
            posted_s += self._read(local, remote, indices, case["bytes"])
        return {
            "wall_s": time.perf_counter() - begun_s,
            "cpu_s": time.process_time() - spent_s,
            "post_s": posted_s,
        }

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


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]))
    else:
        reader = Reader(json.loads(sys.argv[2]))
        peer.read(reader.memory, reader.carry_out)
