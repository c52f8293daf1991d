#!/usr/bin/env python3
"""Makes, or finds again, the environment in which real vLLM engines run on a CPU.

It lies under ``${HETERO_KV_CACHE:-~/.cache/hetero_kv}/vllm-KEY``. KEY is a hash of
``vllm-env.lock``, which pins every package, so an environment never changes after it is made:
other pins are another folder. A stamp file written last says that a folder is complete; a folder
without one is a build that was cut off, and is made again.

Needs only the standard library of the Python that runs it. Progress goes to stderr; the last and
only line of stdout is the path of the environment's interpreter.

pip's own settings hold (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf): where they lead to a CPU build
of torch that one is taken, else PyPI's ordinary build, which gives the same tokens but is larger.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = Path(__file__).resolve().parent / "vllm-env.lock"
SECTIONS = ("python", "torch-cpu", "torch-ordinary", "vllm", "checks")
STAMP_NAME = "hetero_kv_env.json"

# Raised when the steps below change so that an older folder would not do.
RECIPE_VERSION = 1

# Measured on Linux x86-64 (installed size plus what pip holds while it unpacks), rounded up.
DISK_NEEDED_BYTES = {"torch-cpu": 6 << 30, "torch-ordinary": 11 << 30}
RESOLVE_TIMEOUT_S = 300
INSTALL_TIMEOUT_S = 3600
VERIFY_TIMEOUT_S = 600

# Imports what an engine imports, and reports the platform that vLLM picks.
VERIFY_PROGRAM = """
import json, torch, vllm
import vllm.entrypoints.openai.api_server
from vllm.platforms import current_platform
print(json.dumps({
    "torch": torch.__version__, "vllm": vllm.__version__,
    "platform": current_platform.device_type,
}))
"""


class EnvError(Exception):
    """Something that the user can mend; its text is the whole message."""


@dataclasses.dataclass(frozen=True)
class Lock:
    """The pins, by section, and the key that they give the environment."""

    sections: dict[str, list[str]]
    key: str

    @property
    def python_version(self) -> str:
        return self.sections["python"][0]

    def torch_pin(self, section: str) -> str:
        return next(line for line in self.sections[section] if line.startswith("torch=="))


def read_lock(path: Path = LOCK_FILE) -> Lock:
    """Parses the lock file.

    Raises `EnvError` when it is missing, a section is missing, or a line is no exact pin.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvError(f"cannot read the list of pinned packages: {error}") from error
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        if line.startswith("[") and line.endswith("]"):
            current = sections.setdefault(line[1:-1], [])
            continue
        if current is None:
            raise EnvError(f"{path}:{number}: a line before the first [section]")
        if current is not sections.get("python") and line.count("==") != 1:
            raise EnvError(f"{path}:{number}: {line!r} is not an exact pin (NAME==VERSION)")
        current.append(line)
    missing = [name for name in SECTIONS if not sections.get(name)]
    if missing:
        raise EnvError(f"{path}: empty or missing sections: {', '.join(missing)}")
    for name in ("torch-cpu", "torch-ordinary"):
        if not any(line.startswith("torch==") for line in sections[name]):
            raise EnvError(f"{path}: section [{name}] pins no torch")
    basis = f"{RECIPE_VERSION}\n{platform.machine()}\n{text}"
    return Lock(sections, hashlib.sha256(basis.encode()).hexdigest()[:12])


def cache_root() -> Path:
    named = os.environ.get("HETERO_KV_CACHE", "")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "hetero_kv"


def env_folder(lock: Lock) -> Path:
    # Absolute: a virtual environment's scripts name their interpreter by its full path.
    return (cache_root() / f"vllm-{lock.key}").absolute()


def env_python(folder: Path) -> Path:
    return folder / "bin" / "python"


def read_stamp(folder: Path) -> dict[str, object] | None:
    """The stamp of a complete environment, or None."""
    try:
        found = json.loads((folder / STAMP_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and env_python(folder).exists() else None


def say(text: str) -> None:
    print(f"vllm-env: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(text: str) -> Iterator[None]:
    """Prints what begins, and the seconds when it ends."""
    say(f"{text} ...")
    begun = time.monotonic()
    yield
    say(f"{text}: {time.monotonic() - begun:.1f} s")


def die_with_parent() -> None:
    """In a child: ends with the parent, or a killed build would go on beside the next one."""
    # prctl(2): PR_SET_PDEATHSIG is 1.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def run(command: list[str], timeout_s: int, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end with all output captured; a timeout is an `EnvError`."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **env},
            preexec_fn=die_with_parent,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvError(f"{' '.join(command[:4])} ... did not end within {timeout_s} s") from error
    except OSError as error:
        raise EnvError(f"cannot run {command[0]}: {error}") from error


def run_or_fail(command: list[str], what: str, timeout_s: int, **env: str) -> str:
    done = run(command, timeout_s, **env)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise EnvError(f"{what} failed with exit status {done.returncode}:\n{tail}")
    return done.stdout


def find_base_python(version: str) -> str:
    """An interpreter of the pinned minor version: this one, or one on PATH.

    ``HETERO_KV_PYTHON`` names one outright. Raises `EnvError` when there is none.
    """
    program = "import sys; print('%d.%d' % sys.version_info[:2])"
    named = os.environ.get("HETERO_KV_PYTHON")
    candidates = [named] if named else [sys.executable, f"python{version}", "python3"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found and run([found, "-c", program], 30).stdout.strip() == version:
            return found
    raise EnvError(
        f"the pinned packages are for Python {version}; none found (tried "
        f"{', '.join(candidates)}). Install python{version} with its venv module, "
        "or name an interpreter by HETERO_KV_PYTHON."
    )


def needs(folder: Path, lock: Lock) -> list[str]:
    """What making the environment and the wheel takes, as lines to print; checks what it can.

    Raises `EnvError` that lists everything that is missing.
    """
    ready = read_stamp(folder) is not None
    missing = []
    try:
        base = find_base_python(lock.python_version)
        if not ready and run([base, "-c", "import ensurepip, venv"], 30).returncode != 0:
            missing.append(f"the venv module of {base} (Debian: apt-get install python3-venv)")
    except EnvError as error:
        missing.append(str(error))
    for tool, why in (("cargo", "Rust, https://rustup.rs"), ("cc", "Debian: gcc")):
        if shutil.which(tool) is None:
            missing.append(f"{tool} ({why})")
    place = folder.parent
    place.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place).free
    wanted = 0 if ready else DISK_NEEDED_BYTES["torch-cpu"]
    if free < wanted:
        missing.append(f"{wanted >> 30} GiB of disk at {place}; {free / 2**30:.1f} GiB are free")
    if missing:
        raise EnvError("missing:\n  " + "\n  ".join(missing))
    if ready:
        environment = f"vLLM environment: ready at {folder}"
    else:
        cpu, ordinary = (size >> 30 for size in DISK_NEEDED_BYTES.values())
        environment = (
            f"vLLM environment: to be made at {folder}, 3 to 10 minutes, 1 to 4 GB to download; "
            f"disk {cpu} GiB with torch's CPU build, {ordinary} with the ordinary one, "
            f"{free >> 30} GiB free"
        )
    return [
        environment,
        "wheel: cargo and a C compiler (found); 2 to 7 minutes and 1 GB of disk the first time",
        f"system packages: Python {lock.python_version} with venv (found), nothing else",
    ]


def choose_torch(pip: list[str], lock: Lock) -> str:
    """The torch section to install: the CPU build where pip can get it."""
    wanted = lock.sections["torch-cpu"]
    command = [*pip, "install", "--dry-run", "--no-deps", "--quiet", *wanted]
    if run(command, RESOLVE_TIMEOUT_S).returncode == 0:
        return "torch-cpu"
    return "torch-ordinary"


def check_disk(folder: Path, route: str) -> None:
    needed = DISK_NEEDED_BYTES[route]
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvError(
            f"not enough disk: {free / 2**30:.1f} GiB free at {folder}, {needed >> 30} GiB needed "
            "for vLLM's CPU build. Free some, or name another place by HETERO_KV_CACHE."
        )
    say(f"disk: {free / 2**30:.0f} GiB free at {folder}, {needed >> 30} GiB needed at most")


def build(folder: Path, lock: Lock) -> None:
    """Makes the environment in `folder`, which is removed first; the stamp is written last."""
    if folder.exists():
        say(f"{folder} is incomplete; made again")
        shutil.rmtree(folder)
    base = find_base_python(lock.python_version)
    check_disk(folder.parent, "torch-cpu")
    begun = time.monotonic()
    with step(f"virtual environment from {base}"):
        run_or_fail(
            [base, "-m", "venv", str(folder)],
            "python -m venv (on Debian it needs the package python3-venv)",
            300,
        )
    pip = [str(env_python(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    with step("looking for torch's CPU build"):
        route = choose_torch(pip, lock)
    if route == "torch-cpu":
        say(f"taking {lock.torch_pin(route)}")
    else:
        say(
            f"{lock.sections['torch-cpu'][0]} is not offered by pip's indexes: taking the "
            f"ordinary {lock.torch_pin(route)} (larger, same tokens)"
        )
        check_disk(folder.parent, route)
    # pip unpacks here, on the file system whose free space has been checked.
    scratch = folder / "tmp"
    scratch.mkdir()
    for name in (route, "vllm", "checks"):
        pins = lock.sections[name]
        with step(f"installing [{name}], {len(pins)} packages"):
            requirements = scratch / "requirements.txt"
            requirements.write_text("\n".join(pins) + "\n", encoding="utf-8")
            run_or_fail(
                [*pip, "install", "--no-deps", "--quiet", "--requirement", str(requirements)],
                f"installing [{name}]",
                INSTALL_TIMEOUT_S,
                TMPDIR=str(scratch),
            )
    shutil.rmtree(scratch)
    with step("importing vLLM"):
        found = verify(folder)
    size_bytes = int(run_or_fail(["du", "-sk", str(folder)], "du", 300).split()[0]) << 10
    record = {
        **found,
        "route": route,
        "machine": platform.machine(),
        "built_in_s": round(time.monotonic() - begun, 1),
        "size_bytes": size_bytes,
    }
    partial = folder / (STAMP_NAME + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.rename(folder / STAMP_NAME)


def verify(folder: Path) -> dict[str, str]:
    """Imports vLLM with the environment's interpreter; versions and platform as it sees them.

    Raises `EnvError` when an import fails or vLLM does not run on the CPU.
    """
    output = run_or_fail(
        [str(env_python(folder)), "-c", VERIFY_PROGRAM],
        "importing vLLM",
        VERIFY_TIMEOUT_S,
        # The ordinary torch has no "+cpu" in its version, by which vLLM would know.
        VLLM_TARGET_DEVICE="cpu",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    try:
        found = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise EnvError(f"importing vLLM printed something else:\n{output[-2000:]}") from error
    if found.get("platform") != "cpu":
        raise EnvError(f"vLLM takes the platform {found.get('platform')!r}, not the CPU")
    return {str(name): str(value) for name, value in found.items()}


@contextlib.contextmanager
def held_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive file lock, so that two builds at once become one and a waiter.

    The kernel drops it when the process ends, however it ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making this environment; waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def ensure(lock: Lock) -> Path:
    """The interpreter of a complete environment, made if need be."""
    folder = env_folder(lock)
    if read_stamp(folder) is None:
        with held_lock(folder.parent / f"{folder.name}.lock"):
            if read_stamp(folder) is None:
                build(folder, lock)
    record = read_stamp(folder)
    if record is None:
        raise EnvError(f"{folder} has no stamp after it was made")
    say(
        f"vLLM {record.get('vllm')} with torch {record.get('torch')} "
        f"({record.get('route')}), ready at {folder}"
    )
    return env_python(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Makes or reuses the pinned vLLM CPU environment; prints its interpreter."
    )
    parser.add_argument(
        "--print-python",
        action="store_true",
        help="only print the interpreter's path; exit status 3 when it is not made yet",
    )
    parser.add_argument(
        "--needs", action="store_true", help="say what making it takes, check that, and end"
    )
    parser.add_argument("--print-key", action="store_true", help="only print the lock's key")
    parser.add_argument("--verify", action="store_true", help="import vLLM in a ready environment")
    arguments = parser.parse_args(argv)
    try:
        lock = read_lock()
        folder = env_folder(lock)
        if arguments.print_key:
            print(lock.key)
            return 0
        if arguments.print_python:
            print(env_python(folder))
            return 0 if read_stamp(folder) else 3
        if platform.system() != "Linux":
            raise EnvError(f"vLLM's CPU build is for Linux; this is {platform.system()}")
        if arguments.needs:
            for line in needs(folder, lock):
                say(line)
            return 0
        python = ensure(lock)
        if arguments.verify:
            say(f"verified: {verify(folder)}")
        print(python)
    except EnvError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; the next run starts the environment afresh")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
