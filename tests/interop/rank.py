"""The process of one rank: a worker side over memory that numpy owns."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from hetero_kv import _core

from .caches import Model, Place, RankMemory, Style


def process_figures() -> dict[str, int]:
    """Threads, descriptors and resident KiB of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        resident = next(line for line in status if line.startswith("VmRSS"))
    return {
        "threads": len(os.listdir("/proc/self/task")),
        # One is the listing's own.
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,
        "rss_kib": int(resident.split()[1]),
    }


def listening_port() -> int | None:
    """Where this process listens, as the kernel sees it (``/proc/net/tcp``, state 0A)."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    with open("/proc/net/tcp", encoding="ascii") as table:
        for line in table.readlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                return int(columns[1].rpartition(":")[2], 16)
    return None


def main(
    engine: Connection,
    test: Connection,
    options: dict[str, Any],
    model: Model,
    style: Style,
    seed: int,
) -> None:
    """Serves one engine and one test until the test closes its end."""
    _core.init_logging(os.environ.get("HETERO_KV_LOG", "off"))
    engine_options = options["engine"]
    tp_size, tp_rank = engine_options["tp_size"], options["tp_rank"]
    pp_size, pp_rank = engine_options["pp_size"], options["pp_rank"]
    memory = RankMemory.allocate(model, style, Place(tp_size, tp_rank, pp_size, pp_rank))
    memory.fill_all(seed + pp_rank * tp_size + tp_rank)
    try:
        library = None
        if options["settings"]["transport"] == "mori":
            # As the connector does: the package is looked for where it is wanted.
            from hetero_kv import mori

            library = mori.Library()
        worker = _core.Worker(json.dumps(options), json.dumps(memory.describe()), library)
    except Exception as error:
        engine.send(("failed", repr(error)))
        return
    engine.send(("card", worker.card()))
    sources: list[Connection] = [engine, test]
    while test in sources:
        for ready in wait(sources):
            assert isinstance(ready, Connection)
            try:
                command, *arguments = ready.recv()
            except (EOFError, ConnectionResetError):
                # Without its engine a rank stays what it is, as vLLM's workers do for a moment.
                sources.remove(ready)
                continue
            if command == "step":
                orders, fills, wait_ms = arguments
                worker.step(orders, 0.0)
                if wait_ms:
                    worker.wait(wait_ms)
                for generation, blocks in fills:
                    memory.fill_blocks(seed, generation, blocks)
                sent, reports = worker.take_results()
                with suppress(BrokenPipeError):
                    ready.send((sent, [json.loads(report) for report in reports]))
            elif command == "snapshot":
                ready.send([region.tobytes() for region in memory.regions])
            elif command == "scribble":
                (blocks,) = arguments
                memory.fill_blocks(999, 999, blocks)
                ready.send(None)
            elif command == "data_port":
                ready.send(listening_port())
            elif command == "figures":
                ready.send({**json.loads(worker.figures()), **process_figures()})
            elif command == "shutdown":
                ready.send(worker.shutdown(10.0))
            else:
                raise AssertionError(command)
