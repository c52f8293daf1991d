"""Processes as the kernel sees them: which belong to an engine, what processor time they used."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

PROC = Path("/proc")


class UnsupportedError(Exception):
    """This host lacks what a bench needs; the text says what."""


def tree(root: int) -> list[int]:
    """`root` and every process below it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name in parentheses may hold spaces.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def part(pid: int) -> str:
    """What a process is in an engine. vLLM writes it into the command line: `VLLM::Worker`."""
    title = (PROC / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    if title.startswith("VLLM::"):
        return title.removeprefix("VLLM::").split("_")[0]
    if "api_server" in (PROC / str(pid) / "cmdline").read_text(errors="replace"):
        return "APIServer"
    return "other"


@dataclasses.dataclass(frozen=True)
class Thread:
    """One thread of an engine."""

    part: str
    name: str
    pid: int
    tid: int


def resident_mib(root: int) -> float:
    """Resident memory of a process and every process below it."""
    pages = sum(int((PROC / str(pid) / "statm").read_text().split()[1]) for pid in tree(root))
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def processor_ns(pids: Sequence[int]) -> dict[Thread, int]:
    """Nanoseconds on a processor, user and system, of each thread of these processes.

    From `schedstat`, which counts each switch; utime and stime of `/proc/PID/stat` come in ticks
    of 10 ms. A thread that ends takes its time with it. Raises `UnsupportedError` on a kernel
    that does not count.
    """
    times: dict[Thread, int] = {}
    for pid in pids:
        name_of_part = part(pid)
        for task in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                name = (task / "comm").read_text().strip()
                thread = Thread(name_of_part, name, pid, int(task.name))
                times[thread] = int((task / "schedstat").read_text().split()[0])
    if not any(times.values()):
        raise UnsupportedError("/proc/PID/task/TID/schedstat counts nothing on this kernel")
    return times


def used_s(before: Mapping[Thread, int], after: Mapping[Thread, int]) -> dict[Thread, float]:
    """Seconds of each thread between two readings; a thread that came meanwhile counts from 0."""
    return {thread: (ns - before.get(thread, 0)) / 1e9 for thread, ns in after.items()}


def load_average() -> float:
    """Of the last minute, for the report: a bench on a busy host says so."""
    return os.getloadavg()[0]
