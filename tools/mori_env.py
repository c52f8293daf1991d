#!/usr/bin/env python3
"""Makes, or finds again, the environment in which AMD's MoRI-IO runs on a machine without a GPU
and without an RDMA device.

It lies under ``${HETERO_KV_CACHE:-~/.cache/hetero_kv}/mori-KEY``: a CPython 3.10 with AMD's own
``amd-mori`` wheel, and in ``doubles-KEY`` what the wheel links and such a machine lacks, built from
``tests/doubles``. The keys are hashes of the pins and of those sources, so neither folder changes
after it is made; a stamp file written last says that one is complete.

Needs the standard library of the Python that runs it, gcc, binutils, and the packages that it
names. Progress goes to stderr; stdout has two lines: the environment's interpreter, and the folder
of the doubles, which has to be its ``LD_LIBRARY_PATH``.
Exits with 3 and one line of reason where this machine cannot have it: no such interpreter, a
package missing, no way to the wheel. What fails in building from this checkout exits with 1.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from vllm_env import EnvError, cache_root, run, run_or_fail

DOUBLES = Path(__file__).resolve().parent.parent / "tests" / "doubles"

# The wheel for CPython 3.10 needs glibc 2.34; the one for 3.12 needs 2.38. There is no other.
PYTHON_VERSION = "3.10"
PINS = ("amd-mori==1.2.4", "numpy==2.2.6")
GLIBC_NEEDED = (2, 34)

# Raised when the steps below change so that an older folder would not do.
RECIPE_VERSION = 1

STAMP_NAME = "hetero_kv_mori.json"
INSTALL_TIMEOUT_S = 900
BUILD_TIMEOUT_S = 300
CANNOT = 3

# Shared libraries that the wheel links and Debian has, by the package that brings them.
SYSTEM_LIBRARIES = {
    "libpci.so.3": "libpci3",
    "libdrm.so.2": "libdrm2",
    "libdrm_amdgpu.so.1": "libdrm-amdgpu1",
    "libnuma.so.1": "libnuma1",
}

# Loads the wheel and starts its RDMA backend on the double.
VERIFY_PROGRAM = """
import json
from mori import cpp
engine = cpp.IOEngine("verify", cpp.IOEngineConfig("127.0.0.1", 0))
engine.CreateBackend(cpp.BackendType.RDMA, cpp.RdmaBackendConfig(enable_notification=False))
print(json.dumps({"port": engine.GetEngineDesc().port}))
engine.RemoveBackend(cpp.BackendType.RDMA)
"""


class CannotHaveError(EnvError):
    """What this machine lacks; nothing of this checkout is wrong."""


def say(text: str) -> None:
    print(f"mori-env: {text}", file=sys.stderr, flush=True)


def sources() -> list[Path]:
    return sorted(path for path in DOUBLES.rglob("*") if path.suffix in (".c", ".h", ".py"))


def key_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]


def env_key() -> str:
    basis = f"{RECIPE_VERSION}\n{platform.machine()}\n{PYTHON_VERSION}\n{PINS}"
    return key_of(basis.encode())


def doubles_key() -> str:
    return key_of(*(part for path in sources() for part in (path.name.encode(), path.read_bytes())))


def find_python() -> str:
    """An interpreter of the wheel's version: named, on PATH, or one that pyenv or uv keeps."""
    program = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    named = os.environ.get("HETERO_KV_PYTHON310")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    kept = [
        str(folder / "bin" / "python3.10")
        for root, pattern in ((pyenv, "3.10.*"), (uv, "cpython-3.10.*"))
        for folder in sorted(root.glob(pattern), reverse=True)
    ]
    candidates = [named] if named else [f"python{PYTHON_VERSION}", *kept]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found and run([found, "-c", program], 30).stdout.strip() == PYTHON_VERSION:
            return found
    raise CannotHaveError(
        f"amd-mori's wheel for this system is for CPython {PYTHON_VERSION}, and none is here "
        f"(tried {', '.join(candidates)}): name one by HETERO_KV_PYTHON310. Debian 12 and PyPI "
        "have none; pyenv and uv make one."
    )


def check_machine() -> None:
    """Raises `CannotHaveError` with all that is missing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise CannotHaveError(
            f"amd-mori has wheels for Linux x86-64 only, not {platform.machine()}"
        )
    faults = []
    have = tuple(int(part) for part in os.confstr("CS_GNU_LIBC_VERSION").split()[-1].split("."))
    if have < GLIBC_NEEDED:
        faults.append(f"glibc {have[0]}.{have[1]} is older than 2.34")
    missing = [tool for tool in ("gcc", "readelf", "ldconfig") if not _which(tool)]
    if missing:
        faults.append(f"{', '.join(missing)} missing (packages gcc, binutils, libc-bin)")
    elif absent := missing_packages():
        faults.append(f"missing packages: apt-get install {' '.join(absent)}")
    if faults:
        raise CannotHaveError("; ".join(faults))


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def missing_packages() -> list[str]:
    known = run([_which("ldconfig") or "ldconfig", "-p"], 30).stdout
    absent = [package for name, package in SYSTEM_LIBRARIES.items() if f"\t{name} " not in known]
    if not Path("/usr/include/infiniband/verbs.h").exists():
        absent.append("libibverbs-dev")
    return absent


def build_verbs(lib: Path) -> None:
    """The double of libibverbs, which needs nothing but gcc and the library's own headers."""
    lib.mkdir(parents=True, exist_ok=True)
    target = lib / "libibverbs.so.1"
    code = [str(path) for path in sorted((DOUBLES / "verbs").glob("*.c"))]
    run_or_fail(
        [
            *("gcc", "-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread"),
            *("-Wall", "-Wextra", "-Werror", "-Wl,-soname,libibverbs.so.1", "-Wl,-Bsymbolic"),
            *("-o", str(target), *code),
        ],
        "building the double of libibverbs",
        BUILD_TIMEOUT_S,
    )
    (lib / "libibverbs.so").unlink(missing_ok=True)
    (lib / "libibverbs.so").symlink_to(target.name)


def make_env(folder: Path) -> None:
    base = find_python()
    say(f"{base} with {', '.join(PINS)} ...")
    run_or_fail([base, "-m", "venv", str(folder)], "venv", INSTALL_TIMEOUT_S)
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check")
    pip = [str(folder / "bin" / "python"), *install, *PINS]
    try:
        run_or_fail(pip, "pip install", INSTALL_TIMEOUT_S)
    except (EnvError, subprocess.SubprocessError) as error:
        raise CannotHaveError(str(error)) from error


def make_doubles(env: Path, folder: Path) -> None:
    say("stand-ins ...")
    build_verbs(folder)
    wheel = next((env / "lib").glob("python3.10/site-packages/mori"))
    run_or_fail(
        [sys.executable, str(DOUBLES / "rocm" / "generate.py"), str(wheel), str(folder)],
        "stand-ins for ROCm",
        BUILD_TIMEOUT_S,
    )
    run_or_fail(
        [str(env / "bin" / "python"), "-c", VERIFY_PROGRAM],
        "starting MoRI-IO on the double",
        60,
        LD_LIBRARY_PATH=str(folder),
    )


def ensure(folder: Path, make: Callable[[Path], None]) -> Path:
    """A complete folder, made if need be; one builder at a time."""
    if (folder / STAMP_NAME).exists():
        return folder
    check_machine()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / STAMP_NAME).exists():
            begun = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            stamp = {"pins": PINS, "seconds": round(time.monotonic() - begun, 1)}
            (folder / STAMP_NAME).write_text(json.dumps(stamp), encoding="utf-8")
            say(f"{folder.name} is ready after {stamp['seconds']} s")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--verbs-only", metavar="FOLDER", help="only build the double of libibverbs, into FOLDER"
    )
    arguments = parser.parse_args()
    try:
        if arguments.verbs_only:
            build_verbs(Path(arguments.verbs_only))
            print(arguments.verbs_only)
            return 0
        env = ensure((cache_root() / f"mori-{env_key()}").absolute(), make_env)
        doubles = ensure(env / f"doubles-{doubles_key()}", lambda out: make_doubles(env, out))
    except CannotHaveError as error:
        say(str(error))
        return CANNOT
    except (EnvError, subprocess.SubprocessError, OSError) as error:
        say(str(error))
        return 1
    print(env / "bin" / "python")
    print(doubles)
    return 0


if __name__ == "__main__":
    sys.exit(main())
