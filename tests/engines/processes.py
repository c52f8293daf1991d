"""Processes of an engine as the kernel sees them: who they are, their memory, their ports. And what
they logged."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hetero_kv.demo.engines import Engine

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LISTEN = "0A"


def tree(root: int) -> list[int]:
    """`root` and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
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


def title(pid: int) -> str:
    """The process's command line; vLLM sets it to what the process does."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def workers(engine: Engine) -> list[int]:
    """The engine's rank processes."""
    found = [pid for pid in tree(engine.process.pid) if "VLLM::Worker" in title(pid)]
    assert found, f"{engine.name}: no worker process among {tree(engine.process.pid)}"
    return found


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def memory(engine: Engine) -> dict[int, int]:
    """Resident bytes of each process of the engine."""
    sizes = {}
    for pid in tree(engine.process.pid):
        with contextlib.suppress(OSError):
            sizes[pid] = rss_bytes(pid)
    return sizes


def listening_ports(engine: Engine, ports: range) -> list[int]:
    """Ports of this range on which a process of the engine listens (IPv4)."""
    inodes = set()
    for pid in tree(engine.process.pid):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        port = int(fields[1].rpartition(":")[2], 16)
        if fields[3] == LISTEN and port in ports and f"socket:[{fields[9]}]" in inodes:
            found.append(port)
    return sorted(found)


def kill_at_once(engine: Engine) -> tuple[float, float]:
    """SIGKILL to every process of the engine. When it was sent, and when all were dead, by
    time.monotonic(): the kernel may take its time, and connections stand until then."""
    pids = tree(engine.process.pid)
    sent_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)), 60.0, "the killed processes are gone", 0.01)
    return sent_s, time.monotonic()


def alive(pid: int) -> bool:
    """Whether the process still runs or is ending; a zombie without other threads is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.02
) -> None:
    """Returns when `condition()` is true; an `AssertionError` naming `what` at the deadline."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {what}"
        time.sleep(interval_s)


# A line of our threads begins with its time in UTC; of vLLM's, warnings tell of its own start only.
_OURS = re.compile(r"^\S+Z +(?P<level>TRACE|DEBUG|INFO|WARN|ERROR) |hetero_kv: ")
_FAILED = re.compile(r"\b(ERROR|CRITICAL|panicked|Traceback)\b")


def told_by(engine: Engine, lines_max: int = 40) -> str:
    """What its log says of a failure: the last lines of our connector, then the last errors."""
    log = engine.process.log_path.read_text(errors="replace")
    lines = [line[:400] for line in log.splitlines()]
    ours = [line for line in lines if _OURS.search(line)]
    failed = [line for line in lines if _FAILED.search(line) and not _OURS.search(line)]
    return "\n".join([*ours[-lines_max:], *failed[-lines_max // 4 :]])
