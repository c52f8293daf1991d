"""Boots Debian's own kernel in the qemu emulator, with the host's files as its own.

No acceleration is asked for: a host that offers /dev/kvm may run guests of its own kind only, and a
machine that hangs is worse than one that is slow.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import uml_machine
from .commands import PrepareError, run

NEEDS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
}

# In the order of loading; what they depend on is found in the modules themselves. Soft-RoCE asks
# for crc32 by name, and nothing here could load it then.
MODULES = (
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "ib_uverbs",
    "rdma_rxe",
    "dummy",
)

# Parts of the kernel's package in which those are, of 400 MB in all.
PARTS = (
    "./boot/vmlinuz-*",
    "./lib/modules/*/modules.builtin",
    "./lib/modules/*/kernel/arch/x86/crypto/*",
    "./lib/modules/*/kernel/crypto/*",
    "./lib/modules/*/kernel/drivers/infiniband/core/*",
    "./lib/modules/*/kernel/drivers/infiniband/sw/rxe/*",
    "./lib/modules/*/kernel/drivers/net/dummy*",
    "./lib/modules/*/kernel/drivers/virtio/*",
    "./lib/modules/*/kernel/fs/*",
    "./lib/modules/*/kernel/lib/*",
    "./lib/modules/*/kernel/net/*",
)

DOWNLOAD_TIMEOUT_S = 900
UNPACK_TIMEOUT_S = 600

INIT = """\
#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs devtmpfs /dev
for module in $($B cat /modules/order); do
    $B insmod /modules/$module || echo "rdma-vm: insmod $module failed"
done
O=trans=virtio,version=9p2000.L,msize=1048576
$B mount -t 9p -o ro,cache=loose,$O host /below
$B mount -t tmpfs tmpfs /above
$B mkdir /above/files /above/work
$B mount -t overlay overlay /root -o lowerdir=/below,upperdir=/above/files,workdir=/above/work
cd /root
$B mount --move /proc proc
$B mount --move /sys sys
$B mount --move /dev dev
$B mount -t tmpfs tmpfs run
$B mkdir -p dev/shm dev/pts run/out
$B mount -t tmpfs tmpfs dev/shm
$B mount -t devpts devpts dev/pts
$B mount -t 9p -o rw,cache=none,$O out run/out
exec $B switch_root /root /bin/bash /run/out/.boot
"""

# LINUX_REBOOT_CMD_RESTART: the emulator is told to end instead.
BOOT = """\
/bin/bash /run/out/.guest
exec {python} -c 'import ctypes; ctypes.CDLL(None).reboot(0x01234567)'
"""


@dataclass(frozen=True)
class Kernel:
    """What the emulator boots."""

    image: Path
    files: Path

    def __str__(self) -> str:
        return str(self.image)


def missing_packages() -> list[str]:
    """Debian packages that this way needs and that the host lacks."""
    return sorted({package for name, package in NEEDS.items() if shutil.which(name) is None})


def key() -> str:
    """Names what this recipe makes; the kernel is whatever Debian had when it was made."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]


def prepare(folder: Path, say) -> Kernel:
    """The kernel and its first files, made when they are not there; raises `PrepareError`."""
    kernel = Kernel(folder / "vmlinux", folder / "files.gz")
    if kernel.image.exists() and kernel.files.exists():
        return kernel
    if platform.machine() != "x86_64":
        raise PrepareError(f"only for x86_64, and this host is {platform.machine()}")
    text = run(["apt-cache", "depends", "linux-image-amd64"], timeout_s=60)
    package = re.search(r"Depends: (linux-image-\S+)", text)
    if not package:
        raise PrepareError("apt knows no linux-image-amd64: run `apt-get update` on Debian")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=folder) as name:
        work = Path(name)
        say(f"downloading {package.group(1)} (about 70 MB)")
        run(
            ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package.group(1)],
            cwd=work,
            timeout_s=DOWNLOAD_TIMEOUT_S,
        )
        archive = next(work.glob("*.deb"))
        parts = " ".join(f"'{part}'" for part in PARTS)
        script = f"dpkg-deb --fsys-tarfile '{archive}' | tar -x -C '{work}' --wildcards {parts}"
        run(["bash", "-euo", "pipefail", "-c", script], timeout_s=UNPACK_TIMEOUT_S)
        image = next((work / "boot").glob("vmlinuz-*"))
        (work / "vmlinux").write_bytes(_elf_of(image.read_bytes()))
        modules = next((work / "lib" / "modules").iterdir())
        files = gzip.compress(_first_files(modules), compresslevel=3)
        (work / "files.gz").write_bytes(files)
        (work / "files.gz").replace(kernel.files)
        (work / "vmlinux").replace(kernel.image)
    return kernel


def argv(kernel: Kernel, out: Path, memory: str) -> list[str]:
    """The command that boots the kernel and runs ``.guest`` of the folder ``out``."""
    boot = out / ".boot"
    boot.write_text(BOOT.format(python=uml_machine.python()), encoding="utf-8")
    # Old enough that no instruction set costs the emulator much, new enough for today's wheels.
    processor = "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt"
    # Timers and watchdogs that take a loaded host for a broken machine.
    patience = "no_timer_check nowatchdog rcupdate.rcu_cpu_stall_suppress=1"
    line = f"console=ttyS0 panic=-1 quiet mitigations=off nokaslr random.trust_cpu=on {patience}"
    share = "security_model=none"
    return [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", processor),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-m", memory, "-smp", "2", "-serial", "stdio"),
        *("-kernel", str(kernel.image), "-initrd", str(kernel.files), "-append", line),
        *("-fsdev", f"local,id=host,path=/,{share},readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
        *("-fsdev", f"local,id=out,path={out},{share}"),
        *("-device", "virtio-9p-pci,fsdev=out,mount_tag=out"),
    ]


def _elf_of(image: bytes) -> bytes:
    """The kernel inside a bzImage: booted as it is, it need not be unpacked by the emulator."""
    for found in re.finditer(rb"\xfd7zXZ\x00", image):
        try:
            kernel = lzma.LZMADecompressor().decompress(image[found.start() :])
        except lzma.LZMAError:
            continue
        if kernel.startswith(b"\x7fELF"):
            return kernel
    raise PrepareError("the kernel's image holds no xz-packed kernel")


def _first_files(modules: Path) -> bytes:
    """The archive that the kernel unpacks as its first root: busybox, modules and the script."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise PrepareError("busybox-static is missing")
    ordered = list(_ordered(modules))
    archive = b""
    for folder in ("bin", "proc", "sys", "dev", "below", "above", "root", "modules"):
        archive += _entry(folder, 0o040755, b"")
    archive += _entry("bin/busybox", 0o100755, Path(busybox).read_bytes())
    archive += _entry("init", 0o100755, INIT.encode())
    for name, content in ordered:
        archive += _entry(f"modules/{name}", 0o100644, content)
    order = "\n".join(name for name, _ in ordered) + "\n"
    archive += _entry("modules/order", 0o100644, order.encode())
    return archive + _entry("TRAILER!!!", 0, b"")


def _entry(name: str, mode: int, content: bytes) -> bytes:
    """One file of a cpio archive in the "newc" format."""
    fields = [0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0]
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(content)


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)


def _ordered(modules: Path) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of each module, after those that it depends on."""
    files = {}
    for path in modules.rglob("*.ko*"):
        files[path.name.split(".ko")[0].replace("-", "_")] = path
    builtin = (modules / "modules.builtin").read_text(encoding="utf-8")
    inside = {Path(line).stem.replace("-", "_") for line in builtin.split()}
    done: set[str] = set()

    def visit(name: str) -> Iterator[tuple[str, bytes]]:
        if name in done or name in inside:
            return
        done.add(name)
        if name not in files:
            raise PrepareError(f"the kernel's package has no module {name}")
        content = files[name].read_bytes()
        if files[name].suffix == ".xz":
            content = lzma.decompress(content)
        depends = re.search(rb"\0depends=([^\0]*)\0", content)
        for other in depends.group(1).decode().split(",") if depends else []:
            if other:
                yield from visit(other.replace("-", "_"))
        yield f"{name}.ko", content

    for name in MODULES:
        yield from visit(name)
