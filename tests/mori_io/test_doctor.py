"""``hetero-kv doctor --transport mori`` on AMD's own wheel over the doubles."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hetero_kv.demo.witness import executable

from .harness import PATIENCE_S, MoriEnv


def line_of(env: MoriEnv, transport: str, **variables: str) -> tuple[str, str]:
    """Status and text of the check ``mori``."""
    doctor = executable("hetero-kv", "HETERO_KV_CLI")
    command = [doctor, "doctor", "--json", "--host", "127.0.0.1", "--seconds", "0", "--rdma", "off"]
    done = subprocess.run(
        [*command, "--transport", transport, "--python", str(env.python)],
        env=env.variables(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 3,
        check=False,
    )
    checks = json.loads(done.stdout)["checks"]
    found = [check for check in checks if check["check"] == "mori"]
    assert len(found) == 1, checks
    return found[0]["status"], found[0]["found"]


def test_what_is_there_is_told_with_its_version_and_the_range(mori_env: MoriEnv) -> None:
    for transport in ("auto", "mori"):
        status, found = line_of(mori_env, transport)
        assert (status, found[:14]) == ("ok", "amd-mori 1.2.4"), found
        assert "supported: 1.2.4 to below 1.3" in found


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"LD_LIBRARY_PATH": ""}, "ROCm 7 is missing or not on the library path"),
        ({"MORI_ROCM_SMI_PATH": "/nonexistent/librocm_smi64.so"}, "install rocm-smi-lib"),
        ({"PYTHONPATH": ""}, "hetero_kv cannot be imported"),
    ],
)
def test_what_is_missing_fails_where_the_transport_is_asked_for(
    mori_env: MoriEnv, variables: dict[str, str], words: str
) -> None:
    status, found = line_of(mori_env, "mori", **variables)
    assert (status, words in found) == ("fail", True), found
    status, found = line_of(mori_env, "auto", **variables)
    assert (status, words in found) == ("ok", True), found
    assert found.startswith("not available, and only transport mori needs it"), found


def test_another_version_is_told_with_both_ends_of_the_range(
    mori_env: MoriEnv, tmp_path: Path
) -> None:
    package = tmp_path / "mori"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.3.0'\n", encoding="utf-8")
    path = f"{tmp_path}:{mori_env.package}"
    status, found = line_of(mori_env, "mori", PYTHONPATH=path)
    assert status == "fail"
    assert "is version 1.3.0, and this transport is for 1.2.4 to below 1.3" in found
