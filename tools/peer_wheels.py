"""Wheels of peers that are measured or tried beside the product: unpacked under the cache, and
installed into no environment.

The cache is ``${HETERO_KV_CACHE:-~/.cache/hetero_kv}``; a folder there is named after what is in
it, and appears whole or not at all. Needs pip in the interpreter that runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VLLM_ROUTER_PIN = "vllm-router==0.1.17"
SMG_PIN = "smg==1.13.0"
SGLANG_ROUTER_PIN = "sglang-router==0.3.2"
NIXL_PIN = "nixl-cu12==1.5.1"
# What vLLM imports: a package that takes the build for the CUDA that torch was built for. Both
# import on a host without CUDA.
NIXL_FOR_VLLM = ("nixl==1.5.1", "nixl-cu13==1.5.1")
MARK = ".installed"
PIP_TIMEOUT_S = 600.0


class WheelError(Exception):
    """A wheel that pip could not get; the text says which and why."""


def cache_folder() -> Path:
    named = os.environ.get("HETERO_KV_CACHE", "")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "hetero_kv"


def unpacked(pin: str, *needs: str, dependencies: bool = False) -> Path:
    """The folder with `pin` and `needs`, to be put on PYTHONPATH; with `dependencies` theirs too.

    Raises `WheelError`.
    """
    folder = cache_folder() / "+".join(name.replace("==", "-") for name in (pin, *needs))
    if (folder / MARK).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += [] if dependencies else ["--no-deps"]
    command += ["--target", str(own), pin, *needs]
    try:
        done = subprocess.run(
            command, check=False, stderr=subprocess.PIPE, text=True, timeout=PIP_TIMEOUT_S
        )
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise WheelError(f"pip cannot install {pin}: {last[0]}")
        (own / MARK).touch()
        own.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            own.rename(folder)
        except OSError as error:
            # Another process was as quick: its folder is as good.
            if not (folder / MARK).is_file():
                raise WheelError(f"{folder}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise WheelError(f"pip did not install {pin} within {PIP_TIMEOUT_S:.0f} s") from error
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return folder
