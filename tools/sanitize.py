#!/usr/bin/env python3
"""``make sanitize``: memory errors, leaks, data races, undefined behaviour, seen while tests run.

    tools/sanitize.py [--only address|thread|miri] [--toolchain NAME]

- ``address``: the tests of hetero-kv-transport under AddressSanitizer, leaks too.
- ``thread``: the same under ThreadSanitizer, but for ``THREAD_LEAVES_OUT``. The standard library is
  built with it: without, whatever its locks put in order is reported as a race.
- ``miri``: those tests of hetero-kv-core under Miri that ``MIRI_TAKES`` names.

Where gcc and libibverbs' headers are, ``verbs`` runs too, on the stand-in of
``tests/doubles/verbs``.

The last line of stdout is ``N passed, M skipped, K failed``. The exit status is 1 where anything
failed, and 77 where anything was skipped: a line says which toolchain or component is missing and
how to get it. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from test_rdma import Counts, of_cargo, stand_in

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = 77
TARGET = "x86_64-unknown-linux-gnu"

THREAD_LEAVES_OUT = (
    # The sanitizer knows nothing of its threads in a forked child, and ends there.
    "hygiene::a_forked_child_gets_a_clear_error",
    # They demand that two things meet within milliseconds, which at a tenth of the speed they miss.
    "control::tests::a_peer_that_never_stops_does_not_hold_up_others",
    "cancel::verbs::nothing_is_written_after_a_cancelled_job_is_reported",
)
# The suppressions of races that are meant, each with its reason.
THREAD_OPTIONS = f"suppressions={ROOT / 'tools' / 'sanitize-thread.supp'}"

# What takes bytes or numbers from outside apart. The state machines take up to a minute a test
# under Miri, and the planner's cases are thousands.
MIRI_TAKES = ("wire::", "lease_page::", "layout::", "step::", "ids::", "digest::")
# Hundreds to thousands of messages each: more than five minutes.
MIRI_LEAVES_OUT = (
    "wire::tests::hostile",
    "wire::params::tests::each_key_missing_or_of_a_wrong_type_is_named",
    "wire::params::tests::huge_and_odd_values_are_refused",
)


@dataclass(frozen=True)
class Check:
    """One run of tests; the components are rustup's names."""

    name: str
    components: tuple[str, ...]
    cargo: tuple[str, ...]
    libtest: tuple[str, ...]
    env: dict[str, str]
    # An optimised build on a host that is busy, and tests at a tenth of their speed.
    timeout_s: int = 3600


def without(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for name in names for word in ("--skip", name))


def under(
    sanitizer: str, options: dict[str, str], leaves_out: tuple[str, ...], *more: str
) -> Check:
    """The transport's tests. Three at a time: some of them hold a time that others' work delays."""
    cargo = ("test", "--release", "--locked", "-p", "hetero-kv-transport", "--lib", "--test", "it")
    flags = {"RUSTFLAGS": f"-Zsanitizer={sanitizer}", **options}
    components = ("rust-src",) if more else ()
    # With a target named, what runs at build time is built without the sanitizer.
    command = (*cargo, "--no-fail-fast", "--target", TARGET, *more)
    return Check(sanitizer, components, command, ("--test-threads=3", *without(leaves_out)), flags)


CHECKS = (
    under("address", {"ASAN_OPTIONS": "detect_leaks=1"}, ()),
    under("thread", {"TSAN_OPTIONS": THREAD_OPTIONS}, THREAD_LEAVES_OUT, "-Zbuild-std"),
    Check(
        "miri",
        ("miri", "rust-src"),
        ("miri", "test", "--locked", "-p", "hetero-kv-core", "--lib"),
        (*MIRI_TAKES, *without(MIRI_LEAVES_OUT)),
        {"MIRIFLAGS": "-Zmiri-disable-isolation"},
    ),
)


def say(text: str) -> None:
    print(text, flush=True)


def lines_of(command: list[str]) -> list[str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    return done.stdout.splitlines() if done.returncode == 0 else []


def missing(check: Check, toolchain: str) -> str:
    """What this host lacks and the way to it; empty where the check can run."""
    if shutil.which("rustup") is None:
        return f"rustup is missing, and with it a {toolchain} toolchain: https://rustup.rs"
    names = [line.split()[0] for line in lines_of(["rustup", "toolchain", "list"]) if line]
    if not any(name == toolchain or name.startswith(f"{toolchain}-") for name in names):
        wanted = "".join(f" -c {component}" for component in check.components)
        return f"no {toolchain} toolchain: rustup toolchain install {toolchain}{wanted}"
    listed = ["rustup", "component", "list", "--installed", "--toolchain", toolchain]
    installed = lines_of(listed)
    lacking = [
        name
        for name in check.components
        if not any(line == name or line.startswith(f"{name}-") for line in installed)
    ]
    if lacking:
        names_of = " ".join(lacking)
        return f"no {names_of}: rustup component add --toolchain {toolchain} {names_of}"
    return ""


def run(check: Check, toolchain: str, double: Path | None, logs: Path) -> tuple[Counts, Path]:
    environment = {**os.environ, **check.env}
    # Each sanitizer makes all objects anew, so each has a folder.
    base = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    environment["CARGO_TARGET_DIR"] = str(base / f"sanitize-{check.name}")
    if double:
        environment |= {"HETERO_KV_LIBIBVERBS": str(double), "HETERO_KV_REQUIRE_RDMA": "1"}
    command = ["rustup", "run", toolchain, "cargo", *check.cargo, "--", *check.libtest]
    log = logs / f"{check.name}.log"
    with log.open("w", encoding="utf-8") as sink:
        try:
            status = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=check.timeout_s,
            ).returncode
        except subprocess.TimeoutExpired:
            say(f"{check.name}: not done in {check.timeout_s} s")
            status = 1
    return of_cargo(log.read_text(encoding="utf-8", errors="replace"), status), log


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[check.name for check in CHECKS])
    parser.add_argument("--toolchain", default="nightly", help="its name for rustup")
    parser.add_argument("--logs", type=Path, default=ROOT / "target" / "sanitize-logs")
    arguments = parser.parse_args()
    logs = arguments.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    double = stand_in(logs)
    total = Counts()
    for check in CHECKS:
        if arguments.only not in (None, check.name):
            continue
        if reason := missing(check, arguments.toolchain):
            say(f"{check.name}: skipped: {reason}")
            total += Counts(skipped=1)
            continue
        begun = time.monotonic()
        counts, log = run(check, arguments.toolchain, double, logs)
        total += counts
        where = f"; see {log}" if counts.failed else ""
        say(f"{check.name}: {counts} ({time.monotonic() - begun:.0f} s){where}")
    say(str(total))
    if total.failed:
        return 1
    return SKIPPED if total.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
