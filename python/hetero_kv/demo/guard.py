"""Runs one command and leaves no process of it behind, however this or its parent ends.

A vLLM engine is a tree of processes that does not follow its root: kill the API server and the
engine cores stay, holding memory and ports. This small parent makes the tree end as one:

* it is a child subreaper, so a process orphaned anywhere below becomes its child, and "nothing is
  left" is what the kernel says (`waitpid` finds no child), not a guess;
* it removes the shared memory that vLLM leaves in /dev/shm;
* it reads its standard input: end of file means that the launcher is gone, also by SIGKILL.

Started by `hetero_kv.demo.engines` as ``python -I guard.py COMMAND...``; standard library only.

Input lines: ``stop SECONDS`` (SIGINT to the command, SIGTERM after that many seconds, SIGKILL to
the whole tree after as many again) and ``kill`` (SIGKILL to the whole tree at once). Output: one
line, ``pid N``, the command's process id. The exit status is the command's, 128 + N for signal N.
What outlives the command is killed after
a few seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

# prctl(2), linux/prctl.h.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# vLLM's CPU all-reduce never unlinks the first kind, also when it ends in order. The others are
# Python's own, which its resource tracker unlinks unless it is killed as well.
SHARED_MEMORY_FOLDER = "/dev/shm/"
LEFT_SHARED_MEMORY = ("vllm_dist_", "psm_", "sem.mp-")

ORPHANED_GRACE_S = 10.0
# What outlives the command for a moment is mostly ending by itself; Python's resource tracker,
# for one, then removes shared memory that would stay for ever if it were killed.
LEFTOVER_GRACE_S = 5.0
# A killed process is gone within milliseconds unless the kernel holds it (uninterruptible sleep).
KILL_REPEAT_S = 0.2
KILL_GIVE_UP_S = 30.0
EXIT_NOT_STARTED = 127
EXIT_NOT_KILLABLE = 125


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def descendants(root: int) -> list[int]:
    """Process ids below `root`, zombies included, from one reading of /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold spaces and brackets; the fields follow the last bracket.
            fields = (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found.extend(below)
        frontier.extend(below)
    return found


def shared_memory(pids: list[int]) -> set[Path]:
    """The shared memory of the kinds above that these processes have mapped.

    By its inode: who has made a semaphore maps it under a name that it had before its own.
    """
    mapped = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue
        for line in maps.splitlines():
            # Addresses, permissions, offset, device, inode, path.
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(SHARED_MEMORY_FOLDER):
                mapped.add(int(fields[4]))
    found = set()
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY_FOLDER) as entries:
        for entry in entries:
            if entry.name.startswith(LEFT_SHARED_MEMORY) and entry.inode() in mapped:
                found.add(Path(entry.path))
    return found


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Guard:
    """The command's process and the steps by which it is brought down."""

    def __init__(self, command: list[str]) -> None:
        self.status: int | None = None
        self.no_children = False
        # What is still to be done to the tree, as (monotonic time, action), earliest first.
        self.agenda: list[tuple[float, Callable[[], None]]] = []
        self.killing_since: float | None = None
        self.input = b""
        self.left_files: set[Path] = set()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(command)

    @staticmethod
    def _become(command: list[str]) -> None:
        """In the child: the command, with nothing on its standard input."""
        try:
            # Should the guard itself be killed, the API server still hears of it.
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            # Python ignores it, and what is ignored stays so over exec.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            # Output goes where the guard's standard error goes: the log.
            os.dup2(2, 1)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"guard: cannot run {command[0]}: {error}\n".encode())
        finally:
            os._exit(EXIT_NOT_STARTED)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.no_children = True
                return
            if pid == 0:
                return
            if pid == self.pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
                if self.killing_since is None:
                    self.note_files()
                    self.agenda = [(time.monotonic() + LEFTOVER_GRACE_S, self.kill_tree)]

    def note_files(self) -> None:
        """Remembers what is to be removed at the end, while its owners can still be asked."""
        self.left_files |= shared_memory(descendants(os.getpid()))

    def remove_files(self) -> None:
        for path in self.left_files:
            path.unlink(missing_ok=True)

    def stop(self, grace_s: float) -> None:
        if self.agenda or self.killing_since is not None:
            return
        self.note_files()
        now = time.monotonic()
        self.agenda = [
            (now, lambda: send(self.pid, signal.SIGINT)),
            (now + grace_s, lambda: send(self.pid, signal.SIGTERM)),
            (now + 2 * grace_s, self.kill_tree),
        ]

    def kill_tree(self) -> None:
        now = time.monotonic()
        if self.killing_since is None:
            self.killing_since = now
            self.note_files()
        for pid in descendants(os.getpid()):
            send(pid, signal.SIGKILL)
        # Repeated: a process may fork between the reading of /proc and its signal.
        self.agenda = [(now + KILL_REPEAT_S, self.kill_tree)]

    def obey(self, line: bytes) -> None:
        words = line.split()
        if words[:1] == [b"kill"]:
            self.kill_tree()
        elif len(words) == 2 and words[0] == b"stop":
            try:
                self.stop(max(0.0, min(float(words[1]), 600.0)))
            except ValueError:
                os.write(2, b"guard: stop takes seconds\n")

    def read_input(self) -> bool:
        """Obeys what has come; False at end of file."""
        data = os.read(0, 4096)
        if not data:
            self.stop(ORPHANED_GRACE_S)
            return False
        *lines, self.input = (self.input + data)[-4096:].split(b"\n")
        for line in lines:
            self.obey(line)
        return True

    def run(self, wakeup: int) -> int:
        watched = [0, wakeup]
        while True:
            self.reap()
            if self.no_children:
                self.remove_files()
                return self.status if self.status is not None else EXIT_NOT_STARTED
            now = time.monotonic()
            while self.agenda and self.agenda[0][0] <= now:
                self.agenda.pop(0)[1]()
            if self.killing_since is not None and now - self.killing_since > KILL_GIVE_UP_S:
                left = descendants(os.getpid())
                os.write(2, f"guard: cannot kill {left}\n".encode())
                return EXIT_NOT_KILLABLE
            wait_s = max(0.0, self.agenda[0][0] - now) if self.agenda else None
            ready, _, _ = select.select(watched, [], [], wait_s)
            if wakeup in ready:
                os.read(wakeup, 4096)
            if 0 in ready and not self.read_input():
                watched.remove(0)


def main() -> int:
    command = sys.argv[1:]
    if not command:
        print("usage: guard.py COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 2
    # Ctrl-C at a terminal reaches the launcher only, which stops engines in order. A session of its
    # own would do as well, but Linux shares the processors out among sessions first (autogroup): a
    # rank that waits by sched_yield, as vLLM's do, then gives way to its own engine alone, and the
    # engine that it waits for gets what is left.
    os.setpgid(0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    guard = Guard(command)
    signal.signal(signal.SIGTERM, lambda *_: guard.stop(ORPHANED_GRACE_S))
    signal.signal(signal.SIGINT, lambda *_: guard.stop(ORPHANED_GRACE_S))
    os.write(1, f"pid {guard.pid}\n".encode())
    return guard.run(woken)


if __name__ == "__main__":
    sys.exit(main())
