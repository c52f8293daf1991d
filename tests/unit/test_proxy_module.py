"""``python -m hetero_kv.proxy`` is the executable under another name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hetero_kv.demo.witness import executable
from hetero_kv.proxy import executable as installed

FLAGS = ["--connector", "nixl", "--prefill", "http://p:1,dp=2", "--retries-max", "1"]
ENV = {"HETERO_KV_PROXY_DECODE": "http://d:2", "HETERO_KV_PROXY_POLICY": "least-loaded"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    folder = Path(executable("hetero-kv-proxy", "HETERO_KV_PROXY")).parent
    env = {**os.environ, **ENV, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_module_is_the_executable() -> None:
    module = [sys.executable, "-m", "hetero_kv.proxy"]
    itself = [str(installed("hetero-kv-proxy"))]
    told = [run(*door, "check", *FLAGS) for door in (module, itself)]
    assert told[0].returncode == 0, told[0].stderr
    assert 'connector = "nixl"' in told[0].stdout
    assert 'decode = ["http://d:2"]' in told[0].stdout
    assert told[0].stdout == told[1].stdout
    # Its exit status and what it says of a fault, too.
    wrong = [run(*door, "check", "--connector", "p2p") for door in (module, itself)]
    assert (wrong[0].returncode, wrong[0].stderr) == (wrong[1].returncode, wrong[1].stderr)
    assert wrong[0].returncode == 2
    assert "--connector p2p: unknown" in wrong[0].stderr
