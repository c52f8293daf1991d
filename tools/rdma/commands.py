"""Commands of this host that make a machine, each within its time."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class PrepareError(Exception):
    """A machine that cannot be made here; the text says which command failed, and with what."""


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Its output. Raises `PrepareError` when it fails or takes longer than `timeout_s`."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PrepareError(f"{' '.join(command[:3])}: {error}") from error
    if done.returncode:
        tail = (done.stderr or done.stdout)[-800:].strip()
        raise PrepareError(f"{' '.join(command[:3])} ended with {done.returncode}: {tail}")
    return done.stdout
