"""The connector's two sides over MoRI-IO, from prefill to release."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .harness import PATIENCE_S, MoriEnv

PROGRAM = Path(__file__).with_name("connector.py")


def answer(env: MoriEnv, *arguments: str) -> Any:
    done = subprocess.run(
        [str(env.python), str(PROGRAM), *arguments],
        env=env.variables(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 4,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("ANSWER "))


@pytest.mark.parametrize("pair", ["gqa 2 to 1", "gqa 1 to 2", "mla 2 to 1"])
def test_every_byte_of_a_load(mori_env: MoriEnv, pair: str) -> None:
    """The program compares them; here is that they came by MoRI-IO."""
    found = answer(mori_env, "exact", pair)
    assert found["moved"] > 0
    assert found["transports"] == ["mori"]


def test_a_prefill_rank_that_dies_fails_the_load_by_name(mori_env: MoriEnv) -> None:
    found = answer(mori_env, "killed")
    assert found["first"]
    assert len(found["lost"]) == 1, found
    assert found["lost"] != [None], found
    assert found["next"], "the next engine is read"


def test_a_side_without_the_transport_is_named(mori_env: MoriEnv) -> None:
    found = answer(mori_env, "mixed")
    assert not found["ok"]
    assert "mori is not offered" in found["text"], found


def test_an_engine_at_an_ipv6_address_does_not_start(mori_env: MoriEnv) -> None:
    text = answer(mori_env, "address", "::1")
    assert "IPv4 addresses only" in text, text
