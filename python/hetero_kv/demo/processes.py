"""Child processes that are watched, and leave nothing behind.

Each runs under `guard.py`, in a process group of its own, with its output in a log file.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
GUARD_ANSWER_TIMEOUT_S = 10.0
LOG_TAIL_BYTES = 256 * 1024
STANDSTILL_TIMEOUT_S = 10.0
# States of a thread that runs nothing, as proc(5) has them: stopped, traced, dead.
STANDING = frozenset("TtZX")

# Lines that say why a program ended: Python's last line of a traceback, and loggers' ERROR.
TELLING = re.compile(r"(^|\s)([A-Za-z_.]*(Error|Exception|Interrupt)\b:|error:|ERROR\b|FATAL\b)")


class ProcessError(Exception):
    """A child ended too early or could not be started; the text holds what its log tells."""


class GuardedProcess:
    """One command under a guard. Not thread-safe; one owner starts, watches and stops it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Starts `command` with `env` added to this process's environment.

        Raises `ProcessError` when the guard does not come up.
        """
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self.started_at_s = time.monotonic()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", str(GUARD), *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(env or {})},
            )
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        output = self._guard.stdout
        assert output is not None, "invariant: Popen was given stdout=PIPE"
        ready, _, _ = select.select([output], [], [], GUARD_ANSWER_TIMEOUT_S)
        line = output.readline() if ready else b""
        if not line.startswith(b"pid "):
            self._guard.kill()
            self._guard.wait()
            raise ProcessError(f"{self.name}: did not start\n{self.log_tail()}")
        return int(line.split()[1])

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_at_s

    def poll(self) -> int | None:
        """The exit status once the command and everything below it are gone, else None."""
        return self._guard.poll()

    def signal_stop(self, grace_s: float) -> None:
        """Begins an orderly end and returns at once; `wait` waits for it."""
        self._say(f"stop {grace_s:.3f}\n".encode())

    def signal_kill(self) -> None:
        """SIGKILL to the whole tree; returns at once."""
        self._say(b"kill\n")

    def wait(self, timeout_s: float) -> int:
        """The exit status; raises `ProcessError` when processes are left after the timeout."""
        try:
            status = self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self.name}: still running after {timeout_s:.0f} s") from None
        self._close()
        return status

    def stop(self, grace_s: float = 15.0) -> int:
        """SIGINT, after `grace_s` SIGTERM, after as long again SIGKILL to what is left."""
        self.signal_stop(grace_s)
        return self.wait(2 * grace_s + 40.0)

    def kill(self) -> int:
        self.signal_kill()
        return self.wait(40.0)

    def log_tail(self, lines_max: int = 15) -> str:
        """The last lines of the log that tell why the program ended, or just its last lines."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        # With the lines after it: messages run on.
        chosen = {
            index + offset
            for index, line in enumerate(lines)
            if TELLING.search(line)
            for offset in range(3)
            if index + offset < len(lines)
        }
        telling = [lines[index] for index in sorted(chosen)]
        shown = telling[-lines_max:] or lines[-lines_max:]
        return "\n".join([*(f"  {line[:400]}" for line in shown), f"  (log: {self.log_path})"])

    def _say(self, line: bytes) -> None:
        stdin = self._guard.stdin
        if stdin is None or stdin.closed:
            return
        # A broken pipe: the guard ended by itself, and there is nothing left to stop.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(line)
            stdin.flush()

    def _close(self) -> None:
        for stream in (self._guard.stdin, self._guard.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def stop_all(processes: Sequence[GuardedProcess], grace_s: float = 15.0) -> None:
    """Stops all at once and waits for every one, also when one cannot be stopped."""
    for process in processes:
        process.signal_stop(grace_s)
    failures = []
    for process in processes:
        try:
            process.wait(2 * grace_s + 40.0)
        except ProcessError as failure:
            failures.append(str(failure))
    if failures:
        raise ProcessError("\n".join(failures))


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Holds processes by SIGSTOP: within the block none of their threads runs.

    The signal alone promises less, since a thread goes on until the kernel has told it. A process
    that has ended is left alone. Raises `ProcessError` when a thread does not come to a stand.
    """
    try:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        end = time.monotonic() + STANDSTILL_TIMEOUT_S
        while running := [pid for pid in pids if not stands_still(pid)]:
            if time.monotonic() > end:
                raise ProcessError(f"not stopped after {STANDSTILL_TIMEOUT_S:.0f} s: {running}")
            time.sleep(0.001)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def stands_still(pid: int) -> bool:
    """Whether no thread of the process runs or will; true when there is no such process."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            # The name in parentheses may hold anything.
            state = stat.read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if state not in STANDING:
            return False
    return True
