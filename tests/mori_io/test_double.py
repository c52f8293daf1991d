"""The double of libibverbs keeps to the rules that programs break."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

DOUBLES = Path(__file__).resolve().parents[1] / "doubles"


def test_the_double_refuses_what_a_device_refuses(tmp_path: Path) -> None:
    """``check.c`` is two processes over it, and tells each case."""
    if shutil.which("gcc") is None or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("needs gcc and libibverbs-dev")
    code = [DOUBLES / "check" / "check.c", *sorted((DOUBLES / "verbs").glob("*.c"))]
    program = tmp_path / "check"
    subprocess.run(
        [
            *("gcc", "-std=gnu11", "-O1", "-pthread", "-Wall", "-Wextra", "-Werror"),
            *("-o", str(program), *map(str, code)),
        ],
        check=True,
        timeout=120,
    )
    done = subprocess.run(
        [str(program)],
        env={**os.environ, "HKV_VERBS_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == 41, done.stdout
