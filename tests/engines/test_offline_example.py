"""`examples/offline_pd.py`: two offline engines of unlike layouts and no server between."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .processes import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "offline_pd.py"
LAYOUT = ("--prefill-tp", "2", "--decode-tp", "1")
# Three engines are started, two of them side by side.
TIMEOUT_S = 900

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(TIMEOUT_S + 60),
]


def run_example(env: dict[str, str], folder: Path, *flags: str) -> tuple[int, list[str]]:
    """Its status and the lines that tell, with no process of it left."""
    out = folder / "out"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--check", *LAYOUT, *flags],
            stdout=file,
            env={**os.environ, **env},
            start_new_session=True,
        )
        try:
            status = process.wait(TIMEOUT_S)
            wait_until(lambda: not session_of(process.pid), 10.0, "its processes are gone", 0.1)
        finally:
            for pid in [process.pid, *session_of(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    pattern = re.compile(r"^(?:equal|UNEQUAL|bytes of KV).*$", re.MULTILINE)
    return status, pattern.findall(out.read_text(errors="replace"))


def session_of(leader: int) -> list[int]:
    """Living processes of this session but its leader."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, _, _, session = stat.read_text(errors="replace").rpartition(")")[2].split()[:4]
            pid = int(stat.parent.name)
            if int(session) == leader and pid != leader and state != "Z":
                found.append(pid)
    return found


def test_kv_moves_between_two_offline_engines(tmp_path: Path) -> None:
    status, lines = run_example({}, tmp_path)
    assert status == 0, lines
    assert [line.split()[0] for line in lines[:-1]] == ["equal"] * 3
    moved = re.fullmatch(
        r"bytes of KV read by decode: (\d+); leases alive on prefill: 0", lines[-1]
    )
    assert moved is not None, lines[-1]
    assert int(moved[1]) > 0


def test_flipped_kv_is_told_by_the_examples_check(tmp_path: Path) -> None:
    """The control: what decode reads is what its tokens come from."""
    status, lines = run_example({"HETERO_KV_FAULT": "flip-source"}, tmp_path)
    assert status == 1
    # The prompt of one token moves nothing.
    assert [line.split()[0] for line in lines[:-1]] == ["UNEQUAL", "UNEQUAL", "equal"]


def fp8_is_available() -> bool:
    """What vLLM's CPU attention asks for."""
    import torch

    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_f") or able.get("amx_tile"))


@pytest.mark.skipif(not fp8_is_available(), reason="fp8 KV on a CPU needs AVX-512 or AMX")
def test_fp8_kv_moves_with_equal_scales_on_both_sides(tmp_path: Path) -> None:
    status, lines = run_example({}, tmp_path, "--engine-args", '{"kv_cache_dtype": "fp8"}')
    assert status == 0, lines
    assert [line.split()[0] for line in lines[:-1]] == ["equal"] * 3
    moved = re.fullmatch(
        r"bytes of KV read by decode: (\d+); leases alive on prefill: 0", lines[-1]
    )
    assert moved is not None, lines[-1]
    assert int(moved[1]) > 0
