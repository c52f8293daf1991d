#!/usr/bin/env python3
"""Breaks the code on purpose, one patch at a time, and demands that the simulator notices.

Each patch in rust/hetero-kv-sim/mutations begins with what it breaks, and names by `Fires:` the
invariant that has to break first in at least one seed, by `Also:` others that may, and by `Run:`
arguments for the simulator where it takes other seeds than the rest. A patch that does not apply, a
mutant that does not build, one that survives all seeds, and one that breaks an invariant it does
not name are failures. The tree is copied to a temporary folder; nothing is changed here. Exit code
0: all killed; 1: some not; 2: usage.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTATIONS = Path("rust/hetero-kv-sim/mutations")
# What the workspace needs to build one crate.
COPIED = ("Cargo.toml", "Cargo.lock", "rust-toolchain.toml", "rust")
# No mutant may hang the job: a build and a run of the simulator take seconds to a few minutes.
BUILD_S_MAX = 1200
RUN_S_MAX = 600
# Seeds that fail before a mutant counts as noticed: enough to see whether they fail alike.
FAILURES_MAX = 6


@dataclass(frozen=True)
class Mutant:
    """One patch and what it says of itself."""

    path: Path
    # As it was read: the folder may change while this runs.
    patch: str
    text: str
    fires: str
    also: frozenset[str]
    # For the simulator, where the seeds that all mutants get are not those that show it.
    arguments: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Mutant:
        patch = path.read_text(encoding="utf-8")
        header = patch.split("\n--- ", 1)[0]
        fires = re.findall(r"^Fires: (\S+)$", header, re.MULTILINE)
        also = re.findall(r"^Also: (.+)$", header, re.MULTILINE)
        arguments = re.findall(r"^Run: (.+)$", header, re.MULTILINE)
        if len(fires) != 1 or len(also) > 1 or len(arguments) > 1:
            raise SystemExit(f"{path}: one `Fires:` is needed, one `Also:` and one `Run:` may be")
        return cls(
            path=path,
            patch=patch,
            text=" ".join(header.split("\nFires:", 1)[0].split()),
            fires=fires[0],
            also=frozenset(name.strip() for line in also for name in line.split(",")),
            arguments=tuple(word for line in arguments for word in line.split()),
        )


def run(
    command: list[str],
    cwd: Path,
    timeout_s: int,
    env: dict[str, str] | None = None,
    stdin: str | None = None,
) -> tuple[int, str]:
    """The exit code and all output; a command that does not end is ended and answers 124."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            input=stdin,
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"did not end within {timeout_s} s"
    return done.returncode, done.stdout


Broken = dict[str, list[int]]


def counts(broken: Broken) -> str:
    """For people."""
    return ", ".join(f"{name} in {len(seeds)} seeds" for name, seeds in sorted(broken.items()))


class Bench:
    """A copy of the tree, built again for each mutant."""

    def __init__(self, folder: Path, seeds: int) -> None:
        self.tree = folder / "tree"
        self.seeds = seeds
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                # With the time of now: cargo must not take what an earlier run left for this one's.
                shutil.copytree(source, self.tree / name, copy_function=shutil.copy)
            elif source.exists():
                self.tree.mkdir(exist_ok=True)
                shutil.copy(source, self.tree / name)
        target = os.environ.get("CARGO_TARGET_DIR")
        # One folder for all mutants, so that only the two changed crates are built again.
        self.target = Path(target) / "mutants" if target else folder / "target"
        self.env = {
            **os.environ,
            "CARGO_TARGET_DIR": str(self.target),
            # A mutant is run once and thrown away.
            "CARGO_INCREMENTAL": "1",
            "CARGO_PROFILE_RELEASE_DEBUG": "0",
            "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1",
            "RUSTFLAGS": os.environ.get("RUSTFLAGS", "") + " --cap-lints allow",
        }

    def patch(self, mutant: Mutant, *, reverse: bool = False) -> str | None:
        """Applies a patch; None, or why it does not apply."""
        command = ["patch", "--strip=1", "--force", "--fuzz=0", "--no-backup-if-mismatch"]
        command += ["--reverse"] if reverse else []
        command += ["--reject-file=-"]
        for dry in (["--dry-run"], []):
            code, output = run(command + dry, self.tree, 60, stdin=mutant.patch)
            if code != 0:
                return output.strip()
        return None

    def build(self) -> str | None:
        command = ["cargo", "build", "--release", "--locked", "--quiet", "-p", "hetero-kv-sim"]
        code, output = run(command, self.tree, BUILD_S_MAX, self.env)
        return None if code == 0 else output.strip()

    def simulate(self, arguments: tuple[str, ...] = ()) -> tuple[Broken, str]:
        """The seeds that broke each invariant first, and the output."""
        binary = self.target / "release" / "hetero-kv-sim"
        command = [str(binary), "--failures-max", str(FAILURES_MAX)]
        command += arguments or ("--seeds", str(self.seeds))
        code, output = run(command, self.tree, RUN_S_MAX)
        broken: Broken = {}
        for seed, invariant in re.findall(r"^seed (\d+): ([a-z-]+) at ", output, re.MULTILINE):
            broken.setdefault(invariant, []).append(int(seed))
        if code not in (0, 1):
            broken["(crash)"] = []
        return broken, output


def judge(bench: Bench, mutant: Mutant) -> tuple[bool, str]:
    """Whether the mutant is killed as it says, and how or why not."""
    problem = bench.patch(mutant)
    if problem is not None:
        return False, f"does not apply:\n{problem}"
    try:
        problem = bench.build()
        if problem is not None:
            return False, f"does not build:\n{problem}"
        broken, output = bench.simulate(mutant.arguments)
    finally:
        problem = bench.patch(mutant, reverse=True)
        if problem is not None:
            raise SystemExit(f"{mutant.path.name} cannot be taken back:\n{problem}")
    if not broken:
        return False, f"survives {bench.seeds} seeds"
    if mutant.fires not in broken:
        return False, f"breaks {counts(broken)}, not {mutant.fires}"
    strange = set(broken) - mutant.also - {mutant.fires}
    if strange:
        return False, f"breaks {counts(broken)}; {sorted(strange)} unnamed:\n{output[-2000:]}"
    return True, f"{counts(broken)}; first {mutant.fires} in seed {broken[mutant.fires][0]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=300, help="seeds per mutant")
    parser.add_argument("names", nargs="*", help="parts of file names; all patches without")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error("--seeds has to be at least 1")
    paths = sorted((ROOT / MUTATIONS).glob("*.patch"))
    if arguments.names:
        paths = [path for path in paths if any(name in path.name for name in arguments.names)]
    if not paths:
        parser.error("no such patch")
    mutants = [Mutant.read(path) for path in paths]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="hetero-kv-mutants-") as folder:
        bench = Bench(Path(folder), arguments.seeds)
        problem = bench.build()
        if problem is not None:
            print(f"the tree does not build:\n{problem}")
            return 1
        broken, output = bench.simulate()
        if broken:
            print(f"the tree itself breaks {counts(broken)}:\n{output[-2000:]}")
            return 1
        for mutant in mutants:
            begun = time.monotonic()
            print(f"{mutant.path.name}: {mutant.text}", file=sys.stderr)
            killed, how = judge(bench, mutant)
            took = f"{time.monotonic() - begun:.0f} s"
            if not killed:
                alive += 1
            word = "killed" if killed else "NOT KILLED"
            print(f"{word} {mutant.path.stem}: {how} ({took})", flush=True)
    print(f"{len(mutants) - alive} of {len(mutants)} mutants killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
