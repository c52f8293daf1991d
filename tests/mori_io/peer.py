"""A process of the MoRI-IO environment that a test drives: memory that is read or written, or who
reads or writes it.

Runs under the environment's own Python, so it imports the package and numpy only. Commands and
answers are lines of JSON on a socket, since MoRI-IO writes its log to standard output.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from hetero_kv import _core, mori


def pattern(seed: int, region: int, size: int) -> np.ndarray:
    """The bytes of a region: other seeds, other bytes."""
    return np.random.default_rng([seed, region]).integers(0, 256, size, dtype=np.uint8)


class Memory:
    """Regions that nothing moves."""

    def __init__(self, sizes: list[int]) -> None:
        self._maps = [mmap.mmap(-1, size) for size in sizes]
        self.arrays = [np.frombuffer(memory, dtype=np.uint8) for memory in self._maps]

    @property
    def regions(self) -> list[tuple[int, int]]:
        return [(int(array.ctypes.data), int(array.nbytes)) for array in self.arrays]


class Pulse(threading.Thread):
    """Notices when no Python thread can run."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self._on = True

    def run(self) -> None:
        last = time.monotonic()
        while self._on:
            time.sleep(0.005)
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - last)
            last = now

    def stop(self) -> float:
        self._on = False
        self.join()
        return self.longest_s


class Peer:
    """What one process holds; each public method is a command."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._source: Any = None
        self._reader: Any = None
        self._writer: Any = None
        self._pulse: Pulse | None = None
        self._bare: Any = None
        self._double = ctypes.CDLL("libibverbs.so.1")

    def source(self, sizes: list[int], seed: int, **options: Any) -> str:
        self._memory = Memory(sizes)
        self.fill(seed)
        self._source = _core.MemorySource(self._memory.regions, mori=mori.Library(), **options)
        return self._source.card().hex()

    def fill(self, seed: int) -> None:
        for region, array in enumerate(self._memory.arrays):
            array[:] = pattern(seed, region, array.nbytes)

    def target(self, sizes: list[int], filler: int, **options: Any) -> str:
        """Memory to be written to."""
        self._memory = Memory(sizes)
        self.refill(filler)
        options = {"notifications": True, **options}
        self._source = _core.MemorySource(self._memory.regions, mori=mori.Library(), **options)
        return self._source.card().hex()

    def arrived(self, writer: str, uids: list[int]) -> list[bool]:
        return [self._source.arrived(bytes.fromhex(writer), uid) for uid in uids]

    def watch(
        self, writer: str, uids: list[int], offset: int, seed: int, patience_s: float
    ) -> dict[str, Any]:
        """Looks for writes without a pause until all have arrived; how long it took, and how many
        bytes from ``offset`` on were not those of ``seed`` at that moment."""
        wanted = pattern(seed, 0, self._memory.arrays[0].nbytes)[offset:]
        begun = time.monotonic()
        while not all(self.arrived(writer, uids)):
            if time.monotonic() - begun > patience_s:
                return {"told": False}
        wrong = int((self._memory.arrays[0][offset:] != wanted).sum())
        return {"told": True, "wrong": wrong, "s": time.monotonic() - begun}

    def revoke(self) -> None:
        self._source.revoke()

    def bump(self, slot: int, epoch: int) -> bool:
        return self._source.bump(slot, epoch)

    def reader(self, sizes: list[int], filler: int, **options: Any) -> None:
        self._memory = Memory(sizes)
        self.refill(filler)
        self._reader = _core.MemoryReader(
            self._memory.regions, "mori", mori=mori.Library(), **options
        )

    def writer(self, sizes: list[int], seed: int, **options: Any) -> None:
        self._memory = Memory(sizes)
        self.fill(seed)
        self._writer = _core.MemoryWriter(self._memory.regions, mori.Library(), **options)

    def open(self, card: str, deadline_s: float = 20.0) -> dict[str, Any]:
        return json.loads(self._writer.open(bytes.fromhex(card), deadline_s))

    def descriptor(self) -> str:
        return self._writer.descriptor().hex()

    def post(self, ticket: int, runs: list[list[int]], **lease: Any) -> dict[str, Any]:
        """Posts a batch, and lets it begin."""
        posted = json.loads(self._writer.post(ticket, [tuple(run) for run in runs], **lease))
        if posted["kind"] is None:
            posted["begun"] = self.poll(0.0)
        return posted

    def poll(self, timeout_s: float) -> dict[str, Any]:
        return json.loads(self._writer.poll(timeout_s))

    def finish(self, count: int, patience_s: float) -> dict[str, Any]:
        """Waits for so many batches, or the failure of all."""
        until = time.monotonic() + patience_s
        done: list[dict[str, Any]] = []
        while len(done) < count and time.monotonic() < until:
            polled = self.poll(until - time.monotonic())
            done += polled["done"]
            if polled["kind"] is not None:
                return {**polled, "done": done}
        return {"kind": None, "text": None, "done": done}

    def quiesce(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return json.loads(self._writer.quiesce(timeout_s))

    def refill(self, filler: int) -> None:
        for array in self._memory.arrays:
            array[:] = filler

    def submit(self, id: int, card: str, runs: list[list[int]], **lease: Any) -> None:
        self._reader.submit(id, bytes.fromhex(card), [tuple(run) for run in runs], **lease)

    def cancel(self, id: int) -> bool:
        return self._reader.cancel(id)

    def drain(self, count: int, patience_s: float) -> list[dict[str, Any]]:
        """Waits for so many jobs; fewer when the time is over."""
        until = time.monotonic() + patience_s
        done: list[dict[str, Any]] = []
        while len(done) < count and time.monotonic() < until:
            self._reader.wait(min(0.5, until - time.monotonic()))
            done += [json.loads(job) for job in self._reader.drain()]
        return done

    def wrong_bytes(self, runs: list[list[int]], seed: int, sizes: list[int], filler: int) -> int:
        """Bytes that differ from what the runs bring from a source of this seed, and from the
        filler elsewhere."""
        sources = [pattern(seed, region, size) for region, size in enumerate(sizes)]
        wanted = [np.full(array.nbytes, filler, np.uint8) for array in self._memory.arrays]
        for source, source_at, dest, dest_at, size in runs:
            wanted[dest][dest_at : dest_at + size] = sources[source][source_at : source_at + size]
        pairs = zip(wanted, self._memory.arrays, strict=True)
        return int(sum((one != other).sum() for one, other in pairs))

    def touched(self, filler: int) -> int:
        return int(sum((array != filler).sum() for array in self._memory.arrays))

    def count(self, byte: int, region: int = 0) -> int:
        """How many bytes of a region have this value."""
        return int((self._memory.arrays[region] == byte).sum())

    def figures(self) -> dict[str, Any]:
        return json.loads(self._reader.figures())

    def shutdown(self, timeout_s: float) -> bool:
        return self._reader.shutdown(timeout_s)

    def close(self) -> None:
        self._source = self._reader = self._writer = None

    def inject(self, rules: str) -> None:
        if self._double.hkv_verbs_inject(rules.encode()) != 0:
            raise ValueError(rules)

    def report(self) -> dict[str, int]:
        """What the double has alive and has done in this process."""
        text = ctypes.create_string_buffer(512)
        self._double.hkv_verbs_report(text, len(text))
        return json.loads(text.value)

    def break_deregistration(self, broken: bool) -> None:
        """Makes MoRI-IO's deregistration fail, as a driver that hangs would."""

        def refuse(engine: mori.Engine) -> None:
            raise RuntimeError("the driver does not answer")

        mori.Engine.deregister_all = refuse if broken else _DEREGISTER_ALL

    def start_pulse(self) -> None:
        self._pulse = Pulse()
        self._pulse.start()

    def stop_pulse(self) -> float:
        return self._pulse.stop()

    def our_cpu_s(self, seconds: float) -> dict[str, float]:
        """CPU seconds of each of our threads while nothing is asked of it."""

        def used() -> dict[str, float]:
            threads = {}
            for task in Path("/proc/self/task").iterdir():
                name = (task / "comm").read_text(encoding="ascii").strip()
                if name.startswith("hkv-"):
                    threads[name] = int((task / "schedstat").read_text().split()[0]) / 1e9
            return threads

        before = used()
        time.sleep(seconds)
        return {name: at - before.get(name, 0.0) for name, at in used().items()}

    def bare_setup(self, engine: str, memory: str) -> str:
        """A session of MoRI-IO itself, over the memory of this reader; see ``bare_read``."""
        library = mori.Library()
        self._bare = library.start("127.0.0.1", 0)
        base, size = self._memory.regions[0]
        self._bare.register(base, size)
        raw = self._bare._engine
        raw.RegisterRemoteEngine(library._cpp.EngineDesc.unpack(bytes.fromhex(engine)))
        self._session = raw.CreateSession(
            self._bare._memories[0], library._cpp.MemoryDesc.unpack(bytes.fromhex(memory))
        )
        return library.version

    def bare_read(self, runs: list[list[int]]) -> float:
        """Seconds of one batch read by the bare session, as its documentation does it."""
        status = self._bare._cpp.TransferStatus()
        # What is read is known before: neither side's time has the making of these lists in it.
        local, remote, sizes = ([run[column] for run in runs] for column in (3, 1, 4))
        begun = time.perf_counter()
        self._session.BatchRead(
            local, remote, sizes, status, self._session.AllocateTransferUniqueId()
        )
        status.Wait()
        taken = time.perf_counter() - begun
        assert status.Succeeded(), status.Message()
        return taken

    def bare_write(self, card_engine: str, memory: str, uid: int) -> str:
        """Writes all of this writer's first memory by MoRI-IO itself, under a number of the test's
        choice; descriptor of the engine. Does not wait."""
        if self._bare is None:
            library = mori.Library()
            self._bare = library.start("127.0.0.1", 0, True)
            self._bare.register(*self._memory.regions[0])
            self._peer = self._bare.learn(bytes.fromhex(card_engine), [bytes.fromhex(memory)])
        size = self._memory.regions[0][1]
        self._transfer = self._peer.write([uid], [0], [[0]], [0], [[0]], [[size]])
        return self._bare.address()[0].hex()

    def bare_wait(self, timeout_ms: int) -> tuple[bool, str | None]:
        return self._transfer.wait(timeout_ms)

    def our_read(self, card: str, runs: list[list[int]]) -> float:
        """Seconds of the same read by the transport, from its submission to its end."""
        self._reader.submit(1, bytes.fromhex(card), [tuple(run) for run in runs])
        while not (done := self._reader.drain()):
            self._reader.wait(30.0)
        job = json.loads(done[0])
        assert job["kind"] is None, job
        return job["ms"] / 1e3


_DEREGISTER_ALL = mori.Engine.deregister_all


def main() -> None:
    """Serves until the test closes its end."""
    _core.init_logging(os.environ.get("HETERO_KV_LOG", "off"))
    channel = socket.socket(fileno=int(sys.argv[1])).makefile("rw", encoding="utf-8")
    peer = Peer()
    for line in channel:
        command, options = json.loads(line)
        try:
            answer = {"ok": getattr(peer, command)(**options)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()
    # Not by way of the interpreter's end, during which objects go in any order.
    os._exit(0)


if __name__ == "__main__":
    main()
