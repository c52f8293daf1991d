"""Pairs of processes that move bytes by order: ours and the bare calls, ours under Python, NIXL,
Mooncake."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from peer_wheels import NIXL_PIN, WheelError, unpacked

from . import kernel

ROOT = Path(__file__).resolve().parents[2]
MOONCAKE_PIN = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
# What its wheel imports.
MOONCAKE_NEEDS = ("aiohttp", "requests", "msgpack")
ANSWER_TIMEOUT_S = 300


class PairError(Exception):
    """A pair that cannot run here, or ended; the text says why."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One transfer. `cpu_s` is of all threads of both processes."""

    wall_s: float
    cpu_s: float
    post_s: float


class Pair:
    """A holding and a reading process."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        mib: int,
        hold: Sequence[str],
        quiet: bool = False,
    ) -> None:
        """`quiet`: what the library writes to standard error is not shown."""
        self.name = name
        self._quiet = quiet
        environment = {**os.environ, **env}
        self._holder = self._start([*command, *hold, str(mib)], environment)
        card = self._line(self._holder)
        self._reader = self._start([*command, "read", card], environment)
        self._known: set[str] = set()

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self._quiet else None,
            env=dict(env),
            text=True,
        )

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None, "invariant: started with stdout=PIPE"
        while line := process.stdout.readline():
            # Libraries print too.
            if line.startswith("{"):
                return line.strip()
        raise PairError(f"{self.name}: ended with status {process.wait()} and no answer")

    @property
    def pids(self) -> list[int]:
        return [self._holder.pid, self._reader.pid]

    def measure(
        self, way: str, case: Mapping[str, Any], times: int = 1, check: bool = False
    ) -> Measured:
        """One order. With `check` every byte is compared, and the figures are of no use."""
        order: dict[str, Any] = {"case": case["name"], "times": times, "check": check}
        if way:
            order["way"] = way
        if self.name != "ours" and case["name"] not in self._known:
            order["cases"] = [dict(case)]
            self._known.add(case["name"])
        assert self._reader.stdin is not None, "invariant: started with stdin=PIPE"
        before = kernel.processor_ns([self._holder.pid])
        self._reader.stdin.write(json.dumps(order) + "\n")
        self._reader.stdin.flush()
        answer = json.loads(self._line(self._reader))
        held = kernel.used_s(before, kernel.processor_ns([self._holder.pid]))
        return Measured(answer["wall_s"], answer["cpu_s"] + sum(held.values()), answer["post_s"])

    @contextlib.contextmanager
    def alone(self, others: Iterable[Pair]) -> Iterator[None]:
        """Every other pair stands still meanwhile: NIXL's agents keep a thread each busy when
        nothing is asked of them."""
        stopped = [pid for pair in others if pair is not self for pid in pair.pids]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        for process in (self._reader, self._holder):
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def build() -> str:
    """Builds our two processes; returns the executable. Raises `PairError` without cargo."""
    command = ["cargo", "bench", "--locked", "--no-run", "--message-format=json"]
    command += ["-p", "hetero-kv-transport", "--bench", "transfer"]
    try:
        built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    except FileNotFoundError as error:
        raise PairError("no cargo on the path: it builds what is measured") from error
    except subprocess.CalledProcessError as error:
        raise PairError(f"cargo bench ended with status {error.returncode}") from error
    found = [
        message["executable"]
        for message in map(json.loads, built.stdout.splitlines())
        if message.get("reason") == "compiler-artifact" and message.get("executable")
    ]
    if len(found) != 1:
        raise PairError(f"cargo bench built {found}, not one executable")
    return str(found[0])


def cases(executable: str) -> dict[str, dict[str, Any]]:
    """The cases by name, as our executable has them."""
    printed = subprocess.run([executable, "cases"], stdout=subprocess.PIPE, text=True, check=True)
    listed = map(json.loads, printed.stdout.splitlines())
    return {case["name"]: case for case in listed}


def wheel(pin: str, *needs: str) -> Path:
    try:
        return unpacked(pin, *needs)
    except WheelError as error:
        raise PairError(str(error)) from error


@contextlib.contextmanager
def ours(executable: str, mib: int) -> Iterator[Pair]:
    pair = Pair("ours", [executable], {}, mib, ["hold", "--mib"])
    try:
        yield pair
    finally:
        pair.stop()


@contextlib.contextmanager
def nixl(mib: int, transports: str = "") -> Iterator[Pair]:
    """`transports` is UCX_TLS; empty for UCX's own choice."""
    env = {"UCX_TLS": transports} if transports else {}
    folder = wheel(NIXL_PIN)
    name = f"nixl {transports}".strip()
    with python_pair(name, "nixl_peer", mib, env, folder) as pair:
        yield pair


@contextlib.contextmanager
def mooncake(mib: int) -> Iterator[Pair]:
    folder = wheel(MOONCAKE_PIN, *MOONCAKE_NEEDS)
    with python_pair("mooncake", "mooncake_peer", mib, {"MC_FORCE_TCP": "1"}, folder) as pair:
        yield pair


@contextlib.contextmanager
def locked(mib: int) -> Iterator[Pair]:
    """Ours under Python, by the package that this interpreter has."""
    with python_pair("locked", "locked_peer", mib, {}) as pair:
        yield pair


@contextlib.contextmanager
def python_pair(
    name: str, module: str, mib: int, env: Mapping[str, str], folder: Path | None = None
) -> Iterator[Pair]:
    """A module of `support` as both processes; a library may bring a folder of its own."""
    paths = [str(folder)] if folder else []
    paths += [str(ROOT / "benches"), os.environ.get("PYTHONPATH", "")]
    environment = {**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", f"support.{module}"]
    pair = Pair(name, command, environment, mib, ["hold"], quiet=folder is not None)
    try:
        yield pair
    finally:
        pair.stop()
