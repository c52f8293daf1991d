"""The guard: whatever a command and its parent do, no process and no shared memory is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_kv.demo.guard import descendants
from hetero_kv.demo.processes import GuardedProcess, ProcessError, stop_all, stopped

# A command that ignores SIGINT and SIGTERM, with a child in a session of its own that does too.
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
print(os.getpid(), flush=True)
time.sleep(600)
"""

# Ends at SIGINT, and leaves an orphan behind.
LEAVES_ORPHAN = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    time.sleep(600)
print(os.getpid(), flush=True)
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
time.sleep(600)
"""

LAUNCHER = """
import sys, time
from pathlib import Path
from hetero_kv.demo.processes import GuardedProcess
process = GuardedProcess("child", [sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
print(process.pid, flush=True)
time.sleep(600)
"""


def eventually(what: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    end = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def start(program: str, tmp_path: Path, name: str = "child") -> GuardedProcess:
    return GuardedProcess(name, [sys.executable, "-c", program], tmp_path / f"{name}.log")


def pids_in(log: Path, count: int) -> list[int]:
    assert eventually(lambda: len(log.read_text().split()) >= count)
    return [int(word) for word in log.read_text().split()[:count]]


def test_stubborn_tree_is_killed(tmp_path: Path) -> None:
    process = start(STUBBORN, tmp_path)
    pids = pids_in(process.log_path, 2)
    assert process.pid in pids
    assert all(map(alive, pids))
    assert process.stop(grace_s=0.2) == 128 + signal.SIGKILL
    assert not any(map(alive, pids))


def test_an_orphan_is_brought_down_with_its_command(tmp_path: Path) -> None:
    process = start(LEAVES_ORPHAN, tmp_path)
    pids = pids_in(process.log_path, 2)
    assert process.stop(grace_s=30.0) == 7
    assert not any(map(alive, pids))


def test_kill_reaches_a_stopped_process(tmp_path: Path) -> None:
    process = start("import time; print(1, flush=True); time.sleep(600)", tmp_path)
    pids_in(process.log_path, 1)
    os.kill(process.pid, signal.SIGSTOP)
    assert process.kill() == 128 + signal.SIGKILL


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, LEAVES_ORPHAN, str(log)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    command = int(launcher.stdout.readline())
    pids = pids_in(log, 2)
    guard = next(pid for pid in descendants(launcher.pid) if command in descendants(pid))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert eventually(lambda: not any(map(alive, [*pids, guard])), 20.0)


def test_a_killed_guard_takes_its_command_along(tmp_path: Path) -> None:
    process = start("import time; print(1, flush=True); time.sleep(600)", tmp_path)
    pids_in(process.log_path, 1)
    (guard,) = [pid for pid in descendants(os.getpid()) if process.pid in descendants(pid)]
    os.kill(guard, signal.SIGKILL)
    assert eventually(lambda: not alive(process.pid))
    process.wait(5.0)


def test_shared_memory_of_vllm_is_removed(tmp_path: Path) -> None:
    name = Path(f"/dev/shm/vllm_dist_test-{os.getpid()}")
    program = (
        "import mmap, os, time\n"
        f"handle = os.open({str(name)!r}, os.O_CREAT | os.O_RDWR, 0o600)\n"
        "os.ftruncate(handle, 4096)\n"
        "kept = mmap.mmap(handle, 4096)\n"
        "print(1, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = start(program, tmp_path)
    pids_in(process.log_path, 1)
    assert name.exists()
    process.kill()
    assert not name.exists()


def test_semaphores_of_killed_processes_are_removed(tmp_path: Path) -> None:
    told = tmp_path / "name"
    program = (
        "import multiprocessing, pathlib, time\n"
        "kept = multiprocessing.get_context('spawn').Semaphore(1)\n"
        f"pathlib.Path({str(told)!r}).write_text(kept._semlock.name)\n"
        "print(1, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = start(program, tmp_path)
    pids_in(process.log_path, 1)
    name = Path("/dev/shm") / f"sem.{told.read_text().removeprefix('/')}"
    assert name.exists()
    # With the whole tree goes Python's resource tracker, which would have removed it.
    process.kill()
    assert not name.exists()


def test_an_early_end_is_told_with_its_reason(tmp_path: Path) -> None:
    process = start("print('x' * 10); raise ValueError('the reason')", tmp_path)
    assert process.wait(10.0) == 1
    assert "ValueError: the reason" in process.log_tail()


def test_a_missing_program_is_an_error_in_the_log(tmp_path: Path) -> None:
    process = GuardedProcess("child", ["/nonexistent/program"], tmp_path / "child.log")
    assert process.wait(10.0) == 127
    assert "/nonexistent/program" in process.log_tail()


def test_stop_all_stops_the_others_when_one_has_ended(tmp_path: Path) -> None:
    ended = start("pass", tmp_path, "ended")
    assert eventually(lambda: ended.poll() is not None)
    running = start("import time; time.sleep(600)", tmp_path, "running")
    stop_all([ended, running], grace_s=5.0)
    assert running.poll() is not None


def test_wait_says_what_is_left(tmp_path: Path) -> None:
    process = start("import time; time.sleep(600)", tmp_path)
    with pytest.raises(ProcessError, match="still running"):
        process.wait(0.1)
    process.kill()


BUSY = """
import threading, time
count = [0] * 4
def work(i):
    while True:
        count[i] += 1
        time.sleep(0)
for i in range(4):
    threading.Thread(target=work, args=(i,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def test_no_thread_of_a_stopped_process_runs() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(20):
            with stopped([process.pid]):
                used = processor_ticks(process.pid)
                time.sleep(0.05)
                assert processor_ticks(process.pid) == used
        assert eventually(lambda: processor_ticks(process.pid) > used), "it goes on afterwards"
    finally:
        process.kill()
        process.wait()
    with stopped([process.pid]):
        pass


def processor_ticks(pid: int) -> list[str]:
    """Times on a processor of each thread, in nanoseconds, as the scheduler counts them."""
    paths = sorted(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return [path.read_text().split()[0] for path in paths]
