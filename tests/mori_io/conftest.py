"""Fixtures of the MoRI-IO tests: AMD's own wheel over doubles of ROCm and libibverbs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero_kv

from .harness import MoriEnv, Peer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mori_env.py"


@pytest.fixture(scope="session")
def mori_env(tmp_path_factory: pytest.TempPathFactory) -> MoriEnv:
    """The environment, or a skip that says what this machine lacks."""
    made = subprocess.run(
        [sys.executable, str(TOOL)], capture_output=True, text=True, timeout=1800, check=False
    )
    if made.returncode == 3:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    python, doubles = map(Path, made.stdout.split())
    # A folder of its own: beside the package lie others, for another version of Python.
    package = tmp_path_factory.mktemp("package")
    (package / "hetero_kv").symlink_to(Path(hetero_kv.__file__).parent)
    return MoriEnv(python, doubles, package, tmp_path_factory.mktemp("verbs"))


class Peers:
    """Starts peers and ends them with the test."""

    def __init__(self, env: MoriEnv) -> None:
        self._env = env
        self._started: list[Peer] = []

    def start(self, **variables: str) -> Peer:
        peer = Peer(self._env, **variables)
        self._started.append(peer)
        return peer

    def end(self) -> None:
        for peer in reversed(self._started):
            peer.end()


@pytest.fixture
def peers(mori_env: MoriEnv) -> Iterator[Peers]:
    """Makes peers for one test."""
    started = Peers(mori_env)
    yield started
    started.end()
