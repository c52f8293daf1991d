"""Boots the user-mode-linux kernel: an ordinary program whose files are the host's."""

from __future__ import annotations

import sys
from pathlib import Path

INIT = """\
#!/bin/bash
# First process of the machine: the host's files below, a tmpfs above.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -n -t proc proc /proc
mount -n -t tmpfs tmpfs /mnt
mkdir -p /mnt/above/files /mnt/above/work /mnt/root
mount -n -t overlay overlay /mnt/root \
    -o lowerdir=/,upperdir=/mnt/above/files,workdir=/mnt/above/work
cd /mnt/root
mount -n -t proc proc proc
mount -n -t sysfs sysfs sys
mount -n -t devtmpfs devtmpfs dev
mount -n -t tmpfs tmpfs run
mkdir -p dev/shm dev/pts run/out
mount -n -t tmpfs tmpfs dev/shm
mount -n -t devpts devpts dev/pts
mount -n -t hostfs none run/out -o {out}
chroot /mnt/root /bin/bash /run/out/.guest
# LINUX_REBOOT_CMD_POWER_OFF: without it the kernel would panic at the end of its first process.
exec {python} -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'
"""


def argv(kernel: Path, out: Path, memory: str) -> list[str]:
    """The command that boots the kernel and runs ``.guest`` of the folder ``out``."""
    init = out / ".init"
    init.write_text(INIT.format(out=out, python=python()), encoding="utf-8")
    init.chmod(0o755)
    return [
        str(kernel),
        f"mem={memory}",
        "root=/dev/root",
        "rootfstype=hostfs",
        "hostfs=/",
        "ro",
        f"init={init}",
        "quiet",
        "con=null",
        "con0=null,fd:1",
        "ssl=null",
    ]


def python() -> str:
    """An interpreter of the host that runs in a machine with next to nothing started: not a shim of
    a version manager."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(path).exists():
            return path
    return str(Path(sys.executable).resolve())
