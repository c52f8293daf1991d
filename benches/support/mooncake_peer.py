"""One of two processes that read each other's memory by Mooncake's transfer engine over tcp:
`hold MIB` and `read CARD`. By hand only: the engine listens at every address of the host.

Needs `mooncake` on the path, and MC_FORCE_TCP=1.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from mooncake.engine import TransferEngine

from . import peer

# Its tcp lane refuses what does not fit its queue, a whole batch at once.
BATCH_RUNS_MAX = 1024
BATCH_BYTES_MAX = 16 << 20

Batch = tuple[list[int], list[int], list[int]]


def engine(memory: peer.Memory) -> Any:
    made = TransferEngine()
    if status := made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"Mooncake does not start: status {status}")
    if status := made.register_memory(memory.base, memory.bytes):
        raise RuntimeError(f"Mooncake does not register memory: status {status}")
    return made


def hold(mib: int) -> None:
    memory = peer.Memory(mib << 20)
    memory.fill()
    made = engine(memory)
    port = made.get_rpc_port()
    peer.hold({"peer": f"127.0.0.1:{port}", "base": memory.base, "bytes": memory.bytes})


class Reader:
    """The reading engine, with the lists of each case prepared once."""

    def __init__(self, card: dict[str, Any]) -> None:
        self._card = card
        self.memory = peer.Memory(card["bytes"])
        self._engine = engine(self.memory)
        self._prepared: dict[str, list[Batch]] = {}

    def _batches(self, case: dict[str, Any]) -> list[Batch]:
        name = case["name"]
        if name not in self._prepared:
            size = case["run_bytes"]
            step = max(1, min(BATCH_RUNS_MAX, BATCH_BYTES_MAX // size))
            runs = case["list"]
            self._prepared[name] = [
                (
                    [self.memory.base + dest for _, dest in runs[at : at + step]],
                    [self._card["base"] + source for source, _ in runs[at : at + step]],
                    [size] * len(runs[at : at + step]),
                )
                for at in range(0, len(runs), step)
            ]
        return self._prepared[name]

    def carry_out(self, case: dict[str, Any], times: int, _way: str) -> dict[str, float]:
        batches = self._batches(case)
        begun_s, spent_s = time.perf_counter(), time.process_time()
        for _ in range(times):
            for batch in batches:
                status = self._engine.batch_transfer_sync_read(self._card["peer"], *batch)
                if status != 0:
                    raise RuntimeError(f"a batch of {len(batch[0])} runs ended as {status}")
        return {
            "wall_s": time.perf_counter() - begun_s,
            "cpu_s": time.process_time() - spent_s,
            "post_s": 0.0,
        }


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]))
    else:
        reader = Reader(json.loads(sys.argv[2]))
        peer.read(reader.memory, reader.carry_out)
