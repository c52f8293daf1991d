#!/usr/bin/env python3
"""Runs a command where there is an RDMA device: in a small virtual machine with Soft-RoCE.

    tools/rdma_vm.py build                       make the kernel, or find it again
    tools/rdma_vm.py run [-t S] [-o FOLDER] -- COMMAND ...
    tools/rdma_vm.py which                       say which machine there is, as `run` would take

The machine sees this host's files, read-only below a tmpfs, so executables, wheels and virtual
environments run unchanged at their own paths; what the command writes to ``$RDMA_OUT`` comes back
in FOLDER. It has no network but loopback, with ``rxe0`` on it at ``$RDMA_ADDRESS``.

Two machines can do this (``--machine`` takes one by name):

- ``uml``: Linux as an ordinary program (user-mode-linux), built once from Debian's kernel source
  and kept in ``${HETERO_KV_CACHE:-~/.cache/hetero_kv}``. At the host's speed; one processor.
- ``qemu``: Debian's own kernel, emulated. Ten times slower; two processors. Taken where the kernel
  of ``uml`` cannot be built.

Exit status of ``run``: the command's; 77 when neither machine can be had, with the reason on
stderr; 124 when the command did not end in time.

Needs only the standard library of the Python that runs it. ``build`` installs missing Debian
packages where it runs as root (``--no-install``: it only names them).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rdma import qemu_machine, uml_kernel, uml_machine
from rdma.commands import PrepareError

SKIPPED = 77
TIMED_OUT = 124

# What the machines run from the host's files, and the Debian package that has each.
GUEST_NEEDS = {"rdma": "iproute2", "ip": "iproute2", "bash": "bash", "mount": "mount"}
GUEST_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libibverbs/librxe-rdmav34.so": "ibverbs-providers",
}
LIBRARY_FOLDERS = (
    "/usr/lib",
    "/lib",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)


class UnavailableError(Exception):
    """This host cannot do it; the text says what is missing."""


def say(text: str) -> None:
    print(f"rdma-vm: {text}", file=sys.stderr, flush=True)


def cache_folder(key: str) -> Path:
    named = os.environ.get("HETERO_KV_CACHE", "")
    root = Path(named).expanduser() if named else Path.home() / ".cache" / "hetero_kv"
    return root.absolute() / f"rdma-{key}"


def missing_for_guest() -> list[str]:
    """Debian packages without which the command would meet no RDMA device."""
    missing = {pkg for exe, pkg in GUEST_NEEDS.items() if shutil.which(exe, path=ROOT_PATH) is None}
    for library, package in GUEST_LIBRARIES.items():
        if not any((Path(folder) / library).exists() for folder in LIBRARY_FOLDERS):
            missing.add(package)
    return sorted(missing)


ROOT_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def install(packages: list[str], allowed: bool) -> None:
    """Installs Debian packages, or says that they are missing."""
    if not packages:
        return
    command = f"apt-get install --no-install-recommends {' '.join(packages)}"
    if not allowed or os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise UnavailableError(f"packages are missing: {command}")
    say(f"installing {', '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=900,
            check=False,
        )
        if done.returncode:
            raise UnavailableError(f"{' '.join(argv[:2])} failed: {done.stderr[-500:].strip()}")


def prepare_uml(allowed: bool) -> Path:
    """The user-mode-linux kernel, built when it is not there."""
    folder = cache_folder(uml_kernel.key())
    kernel = folder / "linux.uml"
    if not kernel.exists():
        install(uml_kernel.missing_packages(), allowed)
        folder.mkdir(parents=True, exist_ok=True)
        begun = time.monotonic()
        try:
            uml_kernel.build(kernel, folder / "make.log", say)
        except PrepareError as error:
            raise UnavailableError(
                f"the user-mode-linux kernel cannot be built: {error}"
            ) from error
        say(f"built {kernel} in {time.monotonic() - begun:.0f} s")
    return kernel


def prepare_qemu(allowed: bool) -> qemu_machine.Kernel:
    """Debian's kernel for the emulator, unpacked when it is not there."""
    install(qemu_machine.missing_packages(), allowed)
    folder = cache_folder(qemu_machine.key())
    try:
        return qemu_machine.prepare(folder, say)
    except PrepareError as error:
        raise UnavailableError(f"the emulated kernel cannot be prepared: {error}") from error


def prepare(machine: str, allowed: bool):
    """(name, what to boot) of the best machine that this host can have."""
    install(missing_for_guest(), allowed)
    reasons = []
    for name, make in (("uml", prepare_uml), ("qemu", prepare_qemu)):
        if machine not in ("auto", name):
            continue
        try:
            return name, make(allowed)
        except UnavailableError as error:
            reasons.append(f"{name}: {error}")
    raise UnavailableError("; ".join(reasons))


# A machine without devices gathers no entropy, and getrandom(2) would wait for ever.
# 0x40085203 is RNDADDENTROPY: (bits, bytes, the bytes).
SEED_PROGRAM = """\
import fcntl, struct
seed = open("/run/out/.seed", "rb").read()
entropy = struct.pack("ii", 8 * len(seed), len(seed)) + seed
fcntl.ioctl(open("/dev/random", "wb"), 0x40085203, entropy)
"""
SEED_BYTES = 512

GUEST_SETUP = f"""\
{shlex.join([uml_machine.python(), "-c", SEED_PROGRAM])}
ulimit -l unlimited
hostname rdma-vm 2>/dev/null
ip link set lo up
ip addr add 10.99.1.1/24 dev lo
rdma link add rxe0 type rxe netdev lo
"""


def guest_script(command: list[str], folder: Path) -> str:
    """What the machine runs once its files are in place. The status goes to a file, since neither
    machine can hand one out itself."""
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "HETERO_KV_CACHE", "HETERO_KV_LOG")
    lines = ["#!/bin/bash"]
    for name in kept:
        if name in os.environ:
            lines.append(f"export {name}={shlex.quote(os.environ[name])}")
    lines.append("export PATH=$PATH:/usr/sbin:/sbin LANG=C.UTF-8")
    lines.append("export RDMA_VM=1 RDMA_OUT=/run/out RDMA_DEVICE=rxe0 RDMA_ADDRESS=10.99.1.1")
    lines.append(GUEST_SETUP)
    lines.append(
        'echo "rdma-vm: up after $(cut -d" " -f1 /proc/uptime) s: $(uname -r),'
        ' $(ls /sys/class/infiniband)"'
    )
    lines.append(f"cd {shlex.quote(str(folder))} || exit")
    lines.append(f"{shlex.join(command)} </dev/null")
    lines.append("echo $? > /run/out/.status.new && mv /run/out/.status.new /run/out/.status")
    lines.append("sync")
    return "\n".join(lines) + "\n"


def run(arguments: argparse.Namespace) -> int:
    name, booted = prepare(arguments.machine, not arguments.no_install)
    out = Path(arguments.out) if arguments.out else Path(tempfile.mkdtemp(prefix="rdma-vm-"))
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    status_file = out / ".status"
    status_file.unlink(missing_ok=True)
    guest = out / ".guest"
    guest.write_text(guest_script(arguments.command, Path.cwd()), encoding="utf-8")
    guest.chmod(0o755)
    (out / ".seed").write_bytes(os.urandom(SEED_BYTES))
    machine = {"uml": uml_machine, "qemu": qemu_machine}[name]
    argv = machine.argv(booted, out, arguments.memory)
    timed_out = relay(argv, out / "console", arguments.timeout)
    try:
        return int(status_file.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        why = f"did not end within {arguments.timeout} s" if timed_out else "ended before it did"
        say(f"no result: the machine ({name}) {why}; its console is {out / 'console'}")
        return TIMED_OUT


def relay(argv: list[str], console: Path, timeout_s: float) -> bool:
    """Runs the machine, its console to stdout and to a file; whether it had to be ended."""
    deadline = time.monotonic() + timeout_s
    with (
        console.open("wb") as kept,
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as machine,
    ):
        assert machine.stdout is not None
        os.set_blocking(machine.stdout.fileno(), False)
        try:
            while True:
                block = machine.stdout.read()
                if block:
                    block = block.replace(b"\r", b"")
                    kept.write(block)
                    sys.stdout.buffer.write(block)
                    sys.stdout.buffer.flush()
                elif block == b"" or machine.poll() is not None:
                    return False
                elif time.monotonic() > deadline:
                    return True
                else:
                    time.sleep(0.02)
        finally:
            # The machine is a group of processes of its own.
            if machine.poll() is None:
                os.killpg(machine.pid, 9)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", choices=("auto", "uml", "qemu"), default="auto")
    parser.add_argument("--no-install", action="store_true", help="name missing packages only")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("build")
    actions.add_parser("which")
    running = actions.add_parser("run")
    running.add_argument("-t", "--timeout", type=float, default=170.0, metavar="SECONDS")
    running.add_argument("-o", "--out", metavar="FOLDER")
    running.add_argument("-m", "--memory", default="3G", metavar="SIZE")
    running.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    try:
        if arguments.action == "run":
            return run(arguments)
        name, booted = prepare(arguments.machine, not arguments.no_install)
        print(f"{name} {booted}")
        return 0
    except UnavailableError as error:
        say(f"skipped: {error}")
        return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
