"""Builds a user-mode-linux kernel with Soft-RoCE (``rdma_rxe``) from Debian's kernel source.

The result is one program of about 6 MB that needs only libc. It is kept under a name made from
this file and its configuration: what changes the recipe makes another folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .commands import PrepareError, run

CONFIG_FILE = Path(__file__).resolve().parent / "uml.config"

# Executables that the build calls, and the Debian package that has each.
BUILD_NEEDS = {
    "gcc": "gcc",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "xz": "xz-utils",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "strip": "binutils",
}

# Options without which the kernel would boot and then be of no use.
REQUIRED = ("INFINIBAND_USER_ACCESS", "RDMA_RXE", "HOSTFS", "OVERLAY_FS", "DEVTMPFS")

# Sources that this configuration never compiles; leaving them packed halves the unpacking. Kconfig
# files and Makefiles stay, since every configuration reads them.
LEFT_PACKED = [
    f"*/{part}"
    for part in (
        "Documentation/*.rst",
        "Documentation/*.yaml",
        "arch/*/boot/dts/*",
        "drivers/clk/*.c",
        "drivers/gpu/*.[ch]",
        "drivers/iio/*.[ch]",
        "drivers/media/*.[ch]",
        "drivers/net/ethernet/*.[ch]",
        "drivers/net/wireless/*.[ch]",
        "drivers/pinctrl/*.c",
        "drivers/scsi/*.[ch]",
        "drivers/staging/*.[ch]",
        "drivers/usb/*.c",
        "sound/*.[ch]",
        "tools/testing/*",
    )
]

DOWNLOAD_TIMEOUT_S = 900
UNPACK_TIMEOUT_S = 600
MAKE_TIMEOUT_S = 3600


def missing_packages() -> list[str]:
    """Debian packages that the build needs and that this host lacks."""
    return sorted({pkg for exe, pkg in BUILD_NEEDS.items() if shutil.which(exe) is None})


def source_package() -> str:
    """The versioned package behind Debian's `linux-source`, for example `linux-source-6.1`."""
    text = run(["apt-cache", "depends", "linux-source"], timeout_s=60)
    found = re.search(r"Depends: (linux-source-\S+)", text)
    if not found:
        raise PrepareError("apt knows no package linux-source: run `apt-get update` on Debian")
    return found.group(1)


def key() -> str:
    """Names the kernel that this recipe and configuration make."""
    basis = Path(__file__).read_bytes() + CONFIG_FILE.read_bytes()
    return hashlib.sha256(basis).hexdigest()[:12]


def build(target: Path, log: Path, say) -> None:
    """Writes the kernel to `target`, last and in one move; raises `PrepareError`."""
    package = source_package()
    with tempfile.TemporaryDirectory(prefix="rdma-uml-", dir=target.parent) as work_name:
        work = Path(work_name)
        say(f"downloading {package} (about 140 MB)")
        run(
            ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package],
            cwd=work,
            timeout_s=DOWNLOAD_TIMEOUT_S,
        )
        archive = next(iter(work.glob("*.deb")), None)
        if archive is None:
            raise PrepareError(f"apt-get download {package} left no file")
        say("unpacking")
        tree = work / "linux"
        tree.mkdir()
        excluded = " ".join(f"--exclude='{pattern}'" for pattern in LEFT_PACKED)
        run(
            [
                "bash",
                "-euo",
                "pipefail",
                "-c",
                f"dpkg-deb --fsys-tarfile '{archive}'"
                " | tar -xO --wildcards './usr/src/linux-source-*.tar.xz'"
                f" | xz -dc | tar -x -C '{tree}' --strip-components=1 --wildcards {excluded}",
            ],
            timeout_s=UNPACK_TIMEOUT_S,
        )
        archive.unlink()
        say("configuring")
        environment = {**os.environ, "KCONFIG_ALLCONFIG": str(CONFIG_FILE)}
        run(
            ["make", "-s", "ARCH=um", "allnoconfig"],
            cwd=tree,
            timeout_s=300,
            environment=environment,
        )
        config = (tree / ".config").read_text(encoding="utf-8")
        lost = [name for name in REQUIRED if f"\nCONFIG_{name}=y\n" not in config]
        if lost:
            raise PrepareError(f"{package} does not take these options for ARCH=um: {lost}")
        say("compiling (about 4 minutes of two cores)")
        with log.open("w", encoding="utf-8") as sink:
            jobs = f"-j{os.cpu_count() or 1}"
            try:
                done = subprocess.run(
                    ["make", "-s", "ARCH=um", jobs, "linux"],
                    cwd=tree,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    timeout=MAKE_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise PrepareError(f"make ran past {MAKE_TIMEOUT_S} s; see {log}") from error
        if done.returncode:
            raise PrepareError(f"make ARCH=um linux failed with {done.returncode}; see {log}")
        run(["strip", "-o", str(work / "kernel"), str(tree / "linux")], timeout_s=120)
        (work / "kernel").replace(target)
