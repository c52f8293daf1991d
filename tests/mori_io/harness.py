"""Peers as the tests hold them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Deadlines are for a hang only: two processors may be shared by everything else.
PATIENCE_S = 60.0

FILLER = 0xA5


@dataclass(frozen=True)
class MoriEnv:
    """The interpreter with AMD's wheel, the doubles, and where this package lies for it."""

    python: Path
    doubles: Path
    package: Path
    meeting: Path

    def variables(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.doubles),
            "PYTHONPATH": str(self.package),
            "HKV_VERBS_DIR": str(self.meeting),
            **more,
        }

    def run(self, program: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end."""
        return subprocess.run(
            [str(self.python), "-c", program],
            env=self.variables(**more),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


class PeerError(Exception):
    """A command failed; the text is the exception's type and words."""


class Peer:
    """A process of the environment."""

    def __init__(self, env: MoriEnv, **variables: str) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [str(env.python), str(Path(__file__).with_name("peer.py")), str(theirs.fileno())],
            env=env.variables(**variables),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if not os.environ.get("HETERO_KV_LOG") else None,
            stderr=None,
        )
        theirs.close()
        ours.settimeout(PATIENCE_S * 2)
        self._channel = ours.makefile("rw", encoding="utf-8")
        self._socket = ours

    def __getattr__(self, command: str) -> Any:
        def call(**options: Any) -> Any:
            self._channel.write(json.dumps([command, options]) + "\n")
            self._channel.flush()
            line = self._channel.readline()
            if not line:
                raise PeerError(f"the process ended: {self._process.wait(PATIENCE_S)}")
            answer = json.loads(line)
            if "error" in answer:
                raise PeerError(answer["error"])
            return answer["ok"]

        return call

    def signal(self, number: signal.Signals) -> None:
        """Sends it; of a stop, waits until every thread has stopped.

        A stop is asked for and not made by ``kill(2)``: until a thread of the process has run and
        taken it, the others go on and answer.
        """
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            eventually(lambda: set(self._thread_states()) == {"T"})

    def _thread_states(self) -> list[str]:
        """One letter for each thread, as in ``proc_pid_stat(5)``."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def end(self) -> None:
        with suppress(OSError):
            self._channel.close()
        self._socket.close()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def read(self, card: str, runs: list[list[int]], id: int = 1, **lease: Any) -> dict[str, Any]:
        """Submits a job and waits for its end."""
        self.submit(id=id, card=card, runs=runs, **lease)
        return self.one()

    def write(self, runs: list[list[int]], ticket: int = 1, **lease: Any) -> dict[str, Any]:
        """Writes a batch to its end: its numbers, and what it ended with."""
        posted = self.post(ticket=ticket, runs=runs, **lease)
        if posted["kind"] is not None:
            return posted
        ended = self.finish(count=1, patience_s=PATIENCE_S)
        # A batch that ends at once has done so while it began.
        done = posted["begun"]["done"] + ended["done"]
        failed = [told for told in (posted["begun"], ended, *done) if told["kind"] is not None]
        assert failed or len(done) == 1, (posted, ended)
        return {"kind": None, "text": None, **(failed[0] if failed else {}), "uids": posted["uids"]}

    def one(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        (done,) = self.drain(count=1, patience_s=patience_s)
        return done


def eventually(check: Any, patience_s: float = PATIENCE_S) -> None:
    """Waits until ``check()`` is true."""
    until = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < until, check
        time.sleep(0.05)
