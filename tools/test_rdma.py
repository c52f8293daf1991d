#!/usr/bin/env python3
"""``make test-rdma``: what needs an RDMA device, run in the machine of ``tools/rdma_vm.py``.

    tools/test_rdma.py [--machine uml|qemu] [--only NAME] [--logs FOLDER]
                       [--wheel FILE --python INTERPRETER]

Each check runs in a machine of its own. Its console goes to a log file; here goes one line with its
counts and time. The last line of stdout is ``N passed, M skipped, K failed``; the exit status is 1
where anything failed. Where no machine can be had its checks are skipped, and a line says why.

The same suite runs on the host too, on the stand-in for libibverbs of ``tests/doubles/verbs``, and
there with errors that no device gives on demand: whatever fails, no wrong byte may count and no
block may stay held.

Needs only the standard library and cargo; the stand-in needs gcc and libibverbs' headers, the
Python check a wheel and an interpreter with pytest and numpy.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VM = [sys.executable, str(ROOT / "tools" / "rdma_vm.py")]
SKIPPED = 77

# Emulated, everything takes about ten times as long.
QEMU_FACTOR = 6


@dataclass(frozen=True)
class Counts:
    """How many tests ended how."""

    passed: int = 0
    skipped: int = 0
    failed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.passed + other.passed,
            self.skipped + other.skipped,
            self.failed + other.failed,
        )

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.skipped} skipped, {self.failed} failed"


@dataclass(frozen=True)
class Check:
    """One command in the machine, and how to count what it says."""

    name: str
    command: list[str]
    timeout_s: float
    count: Callable[[str, int], Counts]
    memory: str = "3G"
    # Without a machine: what needs no device.
    on_host: bool = False


def by_status(_output: str, status: int) -> Counts:
    """One test, which is the command itself."""
    return Counts(passed=1) if status == 0 else Counts(failed=1)


def of_cargo(output: str, status: int) -> Counts:
    """libtest's summaries, and the tests that printed why they did nothing."""
    counts = Counts()
    summaries = re.findall(r"(\d+) passed; (\d+) failed; \d+ ignored", plain(output))
    for passed, failed in summaries:
        counts += Counts(passed=int(passed), failed=int(failed))
    skipped = len(re.findall(r"^skipped: ", plain(output), re.MULTILINE))
    counts = replace(counts, passed=max(0, counts.passed - skipped), skipped=skipped)
    # A binary that was cut off has no summary; one that ran no test tested nothing.
    if (status and not counts.failed) or not (counts.passed or counts.skipped or counts.failed):
        counts += Counts(failed=1)
    return counts


def of_pytest(output: str, status: int) -> Counts:
    """pytest's last line."""
    last = re.findall(r"^=+ (.*(?:passed|failed|skipped|error).*) in .*=+$", plain(output), re.M)

    def number(word: str) -> int:
        return sum(int(found) for line in last[-1:] for found in re.findall(rf"(\d+) {word}", line))

    counts = Counts(number("passed"), number("skipped"), number("failed") + number("error"))
    if (status and not counts.failed) or not last:
        counts += Counts(failed=1)
    return counts


def plain(text: str) -> str:
    """Without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def say(text: str) -> None:
    print(text, flush=True)


def executables(arguments: list[str]) -> dict[str, Path]:
    """What cargo builds, by the name of its target."""
    command = ["cargo", *arguments, "--release", "--locked", "--message-format=json"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, timeout=3600
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed")
    found = {}
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable"):
            found[message["target"]["name"]] = Path(message["executable"])
    return found


LAB_TOPOLOGIES = {
    "tp2 to dp2": "--prefill dp=1,tp=2 --decode dp=2,tp=1 --kv gqa:8:64",
    "tp1 to tp2": "--prefill dp=1,tp=1 --decode dp=1,tp=2 --kv gqa:4:64",
    "tp4 to tp2, replicated": "--prefill dp=1,tp=4 --decode dp=1,tp=2 --kv gqa:2:64",
    "mla tp4 to dp2": "--prefill dp=1,tp=4 --decode dp=2,tp=1 --kv mla:576",
    "two instances, dp2 tp2": "--prefill 2xdp=2,tp=2 --decode dp=2,tp=1 --kv mla:64",
}
LAB_FAULTS = {
    "prefill killed": "--fault kill-prefill@0.4",
    "decode killed": "--fault kill-decode:0.1@0.4",
    "prefill restarted": "--fault restart-prefill@0.4",
    "prefill stopped": "--fault stop-prefill@0.4=2",
    "acknowledgements lost": "--fault drop-acks-decode@0.3",
    "requests left": "--fault abort-decode@0.3",
}


def lab_checks(lab: Path) -> list[Check]:
    common = "--requests 60 --concurrency 6 --layers 2 --transport verbs --json"
    checks = []
    for name, shapes in LAB_TOPOLOGIES.items():
        command = [str(lab), "lab", *shlex.split(f"{shapes} {common}")]
        checks.append(Check(f"lab: {name}", command, 150, by_status))
    base = LAB_TOPOLOGIES["tp2 to dp2"]
    for name, fault in LAB_FAULTS.items():
        command = [str(lab), "lab", *shlex.split(f"{base} {common} --lease-s 4 {fault}")]
        checks.append(Check(f"lab: {name}", command, 150, by_status))
    corrupted = shlex.join(
        [str(lab), "lab", *shlex.split(f"{base} {common} --fault corrupt-prefill@0")]
    )
    # The negative control: what compares bytes has to see those that differ.
    script = f"{corrupted}; [ $? = 1 ]"
    checks.append(Check("lab: corrupted bytes are seen", ["bash", "-c", script], 150, by_status))
    down = f"rdma link delete rxe0; {shlex.quote(str(lab))} lab {base} {common} 2>&1 | tee /run/o; "
    script = f"{down} grep -q 'no RDMA: libibverbs finds no device' /run/o"
    checks.append(Check("lab: no device is told", ["bash", "-c", script], 60, by_status))
    script = (
        "modprobe -q dummy; ip link add dum0 type dummy && rdma link delete rxe0 &&"
        f" rdma link add rxe1 type rxe netdev dum0; {shlex.quote(str(lab))} lab {base} {common}"
        " 2>&1 | tee /run/o; grep -q 'port 1 of rxe1 is DOWN, not ACTIVE' /run/o"
    )
    checks.append(Check("lab: a port that is down is told", ["bash", "-c", script], 60, by_status))
    return checks


def doctor_checks(doctor: Path) -> list[Check]:
    """What ``hetero-kv doctor`` says of a device of the kernel's, and of what is missing."""
    command = f"{shlex.quote(str(doctor))} doctor"
    # No vLLM is looked for; that check fails, and the others are read.
    host = f"{command} --host 127.0.0.1 --seconds 0 --rdma require --python true"
    between = (
        f"{command} listen --listen 127.0.0.1:7000 --rdma require > /run/listen &"
        " for i in $(seq 100); do grep -q listening /run/listen && break; sleep 0.1; done;"
        f" {command} check 127.0.0.1:7000 --rdma require --seconds 0 | tee /run/o &&"
        " grep -q '^ok    rdma .*reads 4194304 bytes of rxe0 port 1 .* there, all right' /run/o"
    )
    told = (
        f"{host} | tee /run/o;"
        " grep -q '^ok    rdma device .*rxe0 port 1 GID .* is taken of rxe0 (port 1 ACTIVE, "
        "Ethernet, MTU .* GIDs: .*(RoCE v2, IPv4)' /run/o &&"
        " grep -q '^ok    rdma library .*libibverbs' /run/o"
    )
    wrong = "".join(
        f"{prepare} {host} {flags} | tee /run/o; grep -Eq '^FAIL  {line}' /run/o || exit 1; "
        for prepare, flags, line in (
            ("", "--verbs-device mlx5_77", "rdma device .*does not exist.*set one of: rxe0"),
            (
                "",
                "--verbs-gid-index 77",
                "rdma device .*GID of index 77: its GIDs: 0 .*ip addr add",
            ),
            (
                "setpriv --bounding-set -ipc_lock prlimit --memlock=65536",
                "",
                "locked memory .*64 KiB.*raise it: .ulimit -l unlimited",
            ),
            (
                "modprobe -q dummy; ip link add dum0 type dummy; rdma link delete rxe0;"
                " rdma link add rxe1 type rxe netdev dum0;",
                "",
                "rdma device .*port 1 of rxe1 is DOWN, not ACTIVE.*ip link set DEV up",
            ),
            ("rdma link delete rxe1;", "", "rdma device .*libibverbs finds no device.*rdma link"),
        )
    )
    return [
        Check("doctor: a device is told", ["bash", "-c", told], 60, by_status),
        Check("doctor: two ends", ["bash", "-c", between], 60, by_status),
        Check("doctor: what is missing is told", ["bash", "-c", wrong], 60, by_status),
    ]


def rust_checks(transport: dict[str, Path]) -> list[Check]:
    required = ["env", "HETERO_KV_REQUIRE_RDMA=1"]
    library = str(transport["hetero_kv_transport"])
    suite = str(transport["it"])
    # A single test by its whole name.
    exactly = [library, "--ignored", "--exact"]
    unprivileged = ["setpriv", "--bounding-set", "-ipc_lock", "prlimit", "--memlock=65536"]
    no_lock = "verbs::tests::memory_that_may_not_be_locked_is_told_with_the_limit"
    objects = ["verbs::", "blocks_are_read_by_each", "rdma_that_cannot_be_used"]
    return [
        Check(
            "objects of the library",
            [*required, library, *objects, "--test-threads=1"],
            120,
            of_cargo,
        ),
        Check(
            "locked memory below what is registered",
            [*required, *unprivileged, *exactly, no_lock],
            60,
            of_cargo,
        ),
        Check(
            "conformance",
            [*required, suite, "verbs::", "hygiene::", "--test-threads=2"],
            400,
            of_cargo,
        ),
        Check(
            "64 KiB reads beside a bare loop",
            [*required, library, "--ignored", "--nocapture", "reads_of_64_kib_go_at_the_speed"],
            120,
            of_cargo,
        ),
    ]


def python_checks(wheel: Path | None, python: Path | None, work: Path) -> list[Check]:
    if not wheel or not python:
        return []
    folder = work / "wheel"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    command = ["env", f"PYTHONPATH={folder}", str(python), "-m", "pytest", "-p", "no:cacheprovider"]
    tests = ["tests/interop/test_exact.py", "-k", "verbs and (mla-2-1 or gqa4-1-2)"]
    return [Check("wheel", [*command, *tests], 170, of_pytest)]


HEADERS = Path("/usr/include/infiniband/verbs.h")
DOUBLE = ROOT / "tests" / "doubles" / "verbs"

# As `tests/doubles/verbs/faults.c` takes them.
INJECTED = (
    "read=retry:after=60",
    "read=access:after=30:count=1",
    "read=flush:after=15:count=2",
    "read=fatal:after=25:count=1",
    "post=enomem:after=10:count=1",
    "reorder=1",
)


def of_lab(output: str, _status: int) -> Counts:
    """A lab whose requests may fail, since errors are injected that it knows nothing of."""
    report = re.search(r"^\{.*\}$", output, re.MULTILINE)
    if not report:
        return Counts(failed=1)
    found = json.loads(report.group())
    right = found["bytes_mismatched"] == 0 and found["blocks_held"] == 0
    return Counts(passed=1) if right and found["requests"]["ok"] else Counts(failed=1)


def stand_in(work: Path) -> Path | None:
    """The stand-in for libibverbs, built into a folder; none, with a line, where it cannot be."""
    sources = sorted(str(path) for path in DOUBLE.glob("*.c"))
    library = work / "libibverbs-double.so"
    flags = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-o", str(library)]
    if not sources or shutil.which("gcc") is None or not HEADERS.exists():
        say("double: skipped; it needs tests/doubles/verbs, gcc and libibverbs-dev")
        return None
    subprocess.run(["gcc", *flags, *sources], check=True, timeout=120)
    return library


def double_checks(transport: dict[str, Path], lab: Path, work: Path) -> list[Check]:
    """The suite on the stand-in, and labs with injected errors; none where it cannot be built."""
    library = stand_in(work)
    if library is None:
        return []
    settings = ["env", f"HETERO_KV_LIBIBVERBS={library}", "HETERO_KV_REQUIRE_RDMA=1"]
    objects = [str(transport["hetero_kv_transport"]), "verbs::", "blocks_are_read_by_each"]
    suite = [str(transport["it"]), "verbs::", "hygiene::", "--test-threads=2"]
    checks = [
        Check("double: objects", [*settings, *objects], 120, of_cargo, on_host=True),
        Check("double: conformance", [*settings, *suite], 300, of_cargo, on_host=True),
    ]
    words = f"lab {LAB_TOPOLOGIES['tp2 to dp2']} --requests 40 --concurrency 6 --layers 2"
    for fault in INJECTED:
        command = [*settings, f"HKV_VERBS_FAULTS={fault}", str(lab)]
        command += shlex.split(f"{words} --transport verbs --lease-s 4 --json")
        checks.append(Check(f"double: {fault}", command, 120, of_lab, on_host=True))
    return checks


def run(check: Check, machine: str, logs: Path) -> tuple[Counts, str]:
    factor = QEMU_FACTOR if machine == "qemu" else 1
    log = logs / (re.sub(r"[^a-z0-9]+", "-", check.name.lower()).strip("-") + ".log")
    out = logs / f"{log.stem}.out"
    limit_s = check.timeout_s * factor
    command = [*VM, "--machine", machine, "--no-install", "run", "-t", str(limit_s)]
    command += ["-m", check.memory, "-o", str(out), "--"]
    if check.on_host:
        limit_s, command = check.timeout_s, ["timeout", str(check.timeout_s)]
    command += check.command
    with log.open("w", encoding="utf-8") as sink:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=limit_s + 120,
        )
    output = log.read_text(encoding="utf-8", errors="replace")
    return check.count(output, done.returncode), str(log)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=("auto", "uml", "qemu"), default="auto")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    parser.add_argument("--logs", type=Path, default=ROOT / "target" / "rdma-logs")
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--no-install", action="store_true")
    arguments = parser.parse_args()

    command = [*VM, "--machine", arguments.machine]
    command += ["--no-install"] if arguments.no_install else []
    found = subprocess.run([*command, "build"], stdout=subprocess.PIPE, text=True, check=False)
    logs = arguments.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    transport = executables(["test", "--no-run", "-p", "hetero-kv-transport"])
    cli = executables(["build", "-p", "hetero-kv-cli"])
    in_machine = rust_checks(transport) + lab_checks(cli["hetero-kv"])
    in_machine += doctor_checks(cli["hetero-kv"])
    in_machine += python_checks(arguments.wheel, arguments.python, logs)
    checks = double_checks(transport, cli["hetero-kv"], logs)
    total = Counts()
    machine = ""
    if found.returncode == SKIPPED:
        say("skipped: there is no machine with an RDMA device (above)")
        total += Counts(skipped=len(in_machine))
    elif found.returncode:
        return found.returncode
    else:
        machine = found.stdout.split()[0]
        checks += in_machine
    checks = [check for check in checks if arguments.only in check.name]

    for check in checks:
        begun = time.monotonic()
        counts, log = run(check, machine, logs)
        total += counts
        where = f"; see {log}" if counts.failed else ""
        say(f"{check.name}: {counts} ({time.monotonic() - begun:.0f} s){where}")
    if not arguments.wheel:
        say("wheel: skipped, since none is given (--wheel, --python)")
        total += Counts(skipped=1)
    say(str(total))
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
