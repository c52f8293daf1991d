#!/usr/bin/env python3
"""``make fuzz``: the proxy's parsers under libFuzzer and AddressSanitizer.

    tools/fuzz.py [--seconds N] [--only TARGET] [--toolchain NAME]

Targets are the folders of ``rust/hetero-kv-proxy/fuzz/corpus``: a client's body and its two legs,
an engine's answer, a worker's registration, a configuration file. Each gets ``--seconds`` (60).
What is found lies in ``target/fuzz/found``: once it is understood, it goes into the corpus, which
``cargo test`` replays.

The last line of stdout is ``N passed, M skipped, K failed``. The exit status is 1 where anything
failed, and 77 where it was skipped: it needs a nightly toolchain and a C++ compiler, and a line
says which is missing. Needs only the standard library.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from test_rdma import Counts

ROOT = Path(__file__).resolve().parent.parent
CRATE = ROOT / "rust" / "hetero-kv-proxy" / "fuzz"
BUILD = ROOT / "target" / "fuzz"
SKIPPED = 77
TARGET = "x86_64-unknown-linux-gnu"
# A body may be 64 MiB; what is told apart by longer ones is told apart by these.
INPUT_BYTES_MAX = 16 << 10
INPUT_TIMEOUT_S = 10
RSS_MIB_MAX = 2048
# What libFuzzer needs of the compiler to see which code an input reaches.
COVERAGE = (
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Zsanitizer=address",
)


def say(line: str) -> None:
    print(line, flush=True)


def missing(toolchain: str) -> str | None:
    if shutil.which("c++") is None:
        return "no C++ compiler; Debian: apt install g++"
    probe = ["cargo", f"+{toolchain}", "--version"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        return f"no toolchain {toolchain}; rustup toolchain install {toolchain}"
    return None


def build(toolchain: str) -> Path:
    """The fuzzer. Raises `CalledProcessError` where it does not build."""
    flags = " ".join(COVERAGE)
    # What is fuzzed has the project's own crates; cargo adds those of the fuzzer to the copy.
    shutil.copy(ROOT / "Cargo.lock", CRATE / "Cargo.lock")
    command = ["cargo", f"+{toolchain}", "build", "--release", "--target", TARGET]
    command += ["--manifest-path", str(CRATE / "Cargo.toml")]
    env = {**os.environ, "CARGO_TARGET_DIR": str(BUILD), "RUSTFLAGS": flags}
    subprocess.run(command, check=True, env=env)
    return BUILD / TARGET / "release" / "fuzz"


def fuzz(executable: Path, target: str, seconds: int) -> bool:
    """Whether `seconds` of inputs held."""
    grown = BUILD / "grown" / target
    found = BUILD / "found" / target
    for folder in (grown, found):
        folder.mkdir(parents=True, exist_ok=True)
    log = BUILD / f"{target}.log"
    command = [str(executable), str(grown), str(CRATE / "corpus" / target)]
    command += [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}"]
    command += [f"-timeout={INPUT_TIMEOUT_S}", f"-rss_limit_mb={RSS_MIB_MAX}"]
    command += [f"-artifact_prefix={found}/", "-print_final_stats=1"]
    env = {**os.environ, "HETERO_KV_FUZZ_TARGET": target}
    begun = time.monotonic()
    with log.open("w", encoding="utf-8") as sink:
        done = subprocess.run(
            command, stdout=sink, stderr=sink, env=env, check=False, timeout=seconds + 600
        )
    text = log.read_text(encoding="utf-8", errors="replace")
    tried = re.search(r"number_of_executed_units: (\d+)", text)
    verdict = "held" if done.returncode == 0 else f"FAILED, see {log} and {found}"
    inputs = f"{int(tried.group(1)):,} inputs" if tried else "inputs not counted"
    say(f"{target}: {verdict} ({inputs}, {time.monotonic() - begun:.0f} s)")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    targets = sorted(folder.name for folder in (CRATE / "corpus").iterdir())
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--only", choices=targets)
    parser.add_argument("--toolchain", default="nightly")
    arguments = parser.parse_args()
    if arguments.only:
        targets = [arguments.only]
    total = Counts()
    if reason := missing(arguments.toolchain):
        say(f"fuzz: skipped, {reason}")
        say(str(Counts(skipped=len(targets))))
        return SKIPPED
    executable = build(arguments.toolchain)
    for target in targets:
        held = fuzz(executable, target, arguments.seconds)
        total += Counts(passed=1) if held else Counts(failed=1)
    say(str(total))
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
