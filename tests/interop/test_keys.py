"""Engines that prove a shared key to each other (the setting ``control_key_file``)."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .caches import Model
from .conftest import MakeEngine
from .harness import EngineStartError, tokens

GQA = Model(kv_heads=4)
A = "key-of-the-cluster-a"
B = "key-of-the-cluster-b"

KeyFile = Callable[..., dict[str, Any]]


@pytest.fixture
def key_file(tmp_path: Path) -> KeyFile:
    """Settings with a file of these keys."""

    def make(*keys: str) -> dict[str, Any]:
        if not keys:
            return {}
        path = tmp_path / f"{'-'.join(key[-1] for key in keys)}.keys"
        path.write_text("# of the cluster\n" + "".join(f"{key}\n" for key in keys))
        path.chmod(0o600)
        return {"control_key_file": str(path)}

    return make


@pytest.mark.parametrize("transport", ["process", "tcp"])
def test_engines_with_equal_keys_move_every_byte(
    make_engine: MakeEngine, key_file: KeyFile, transport: str
) -> None:
    settings = {**key_file(A), "transport": transport}
    p = make_engine("p", GQA, 2, producer=True, settings=settings)
    connect = {**settings, "connect": f"127.0.0.1:{p.port}"}
    d = make_engine("d", GQA, producer=False, settings=connect)
    d.wait_gauge("peers_ready", 1)
    for salt in range(3):
        load = d.loaded(d.decode(p.prefill(tokens(9, salt))))
        assert load.ok, load.text
    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ((A,), (B,), "decode's proof is by no key of this prefill engine's file"),
        ((A,), (), "decode has it set and this prefill engine has not"),
        ((), (A,), "this prefill engine has it set and decode shows no key"),
        ((B, A), (A,), "the first key of decode's file has to be in prefill's"),
    ],
)
def test_engines_without_the_same_key_are_refused_by_name(
    make_engine: MakeEngine,
    key_file: KeyFile,
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    words: str,
) -> None:
    p = make_engine("p", GQA, producer=True, settings=key_file(*theirs))
    d = make_engine("d", GQA, producer=False, settings=key_file(*ours))
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    assert load.reasons == {"pair_refused"}
    assert load.fields == {"control_key_file"}
    assert words in load.text
    assert load.bytes_read == 0
    assert ["pair_refused", "control_key_file", 1] in d.figures()["failures"]
    assert p.figures()["counters"]["peers_rejected"] == 1
    assert p.figures()["counters"]["claims_refused"] == 0
    p.ask("revoke")
    for engine in (p, d):
        engine.assert_clean()
        shown = f"{engine.figures()}{load.text}"
        assert A not in shown
        assert B not in shown


def test_keys_are_changed_one_engine_after_the_other(
    make_engine: MakeEngine, key_file: KeyFile
) -> None:
    """Each step of the way from one key to another, with either engine ahead of the other."""
    steps: list[tuple[str, ...]] = [(A,), (A, B), (B, A), (B,)]
    pairs = [*itertools.pairwise(steps), *itertools.pairwise(reversed(steps))]
    for i, (theirs, ours) in enumerate(pairs):
        p = make_engine(f"p{i}", GQA, producer=True, settings=key_file(*theirs))
        d = make_engine(f"d{i}", GQA, producer=False, settings=key_file(*ours))
        load = d.loaded(d.decode(p.prefill(tokens(9, i))))
        assert load.ok, load.text
        d.check_bytes()
        for engine in (p, d):
            engine.assert_clean()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "No such file"),
        ("", "no key in it"),
        ("# only words\n", "no key in it"),
        (f"{A}\nsecret\n", "line 2: a key has 16 to 512 characters, not 6"),
        ("x" * 513, "line 1: a key has 16 to 512 characters, not 513"),
        ("secret words of many letters\n", "line 1: a key is visible ASCII without blanks"),
        (f"{A}\n" * 20_000, "at most 262144"),
    ],
)
def test_a_file_without_usable_keys_is_a_fault_at_start(
    make_engine: MakeEngine, tmp_path: Path, text: str | None, fault: str
) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
    with pytest.raises(EngineStartError) as failed:
        make_engine("p", GQA, producer=True, settings={"control_key_file": str(path)})
    told = str(failed.value)
    assert "control_key_file" in told
    assert str(path) in told
    assert fault in told
    assert "secret" not in told
    assert A not in told


_ONE_PAIR = """
import importlib
import itertools
import json
import sys

from hetero_kv import _core

_core.init_logging("trace")
one_process = importlib.import_module(sys.argv[1] + ".one_process")
pair = one_process.Pair(*(json.loads(text) for text in sys.argv[2:]))
try:
    pair.load()
finally:
    print(pair.p.figures(), pair.d.figures(), pair.p_worker.figures(), pair.d_worker.figures())
    pair.d.shutdown()
    pair.p.shutdown()
"""


def one_pair(
    prefill: dict[str, Any], decode: dict[str, Any]
) -> tuple[subprocess.CompletedProcess[str], str]:
    """One load at the highest level of logs; all that was said."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    run = subprocess.run(
        [sys.executable, "-c", _ONE_PAIR, __package__, json.dumps(prefill), json.dumps(decode)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    return run, run.stdout + run.stderr


def test_no_log_line_and_no_figure_shows_a_key(key_file: KeyFile) -> None:
    for theirs, ours in [((A, B), (A,)), ((A,), (B,)), ((A,), ()), ((), (A,))]:
        run, said = one_pair(key_file(*theirs), key_file(*ours))
        alike = theirs[:1] == ours[:1]
        assert (run.returncode == 0) == alike, said
        assert ("paired with prefill engine" in said) == alike, said
        # Both sides tell: decode why its requests fail, prefill whom it refuses.
        told = [line for line in said.splitlines() if "control_key_file: " in line]
        refused = [line for line in told if "a consumer is refused" in line]
        assert bool(refused) == (not alike), said
        assert (len(told) > len(refused)) == (not alike), said
        for key in (A, B):
            for shown in (key, key.encode().hex(), str(list(key.encode()))[1:-1]):
                assert shown not in said


def test_keys_that_every_user_may_read_are_told_of(key_file: KeyFile) -> None:
    settings = key_file(A)
    path = Path(settings["control_key_file"])
    _, said = one_pair(settings, settings)
    assert "may read" not in said
    path.chmod(0o644)
    run, said = one_pair(settings, settings)
    assert run.returncode == 0, said
    told = re.findall(r"every user of this host may read .* \(mode 644\)", said)
    assert told, said
    assert str(path) in said
