"""What is refused over MoRI-IO, and in which words: cards that lie, machines that lack a part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Peers
from .harness import FILLER, MoriEnv, Peer

msgpack = pytest.importorskip("msgspec.msgpack", reason="msgspec writes the cards that lie")

SIZE = 1 << 20


def lied(card: str, change: Callable[[dict[str, Any]], None]) -> str:
    """The card with one thing changed."""
    read = msgpack.decode(bytes.fromhex(card))
    change(read)
    return msgpack.encode(read).hex()


@pytest.fixture
def pair(peers: Peers) -> tuple[Peer, Peer, str]:
    source, reader = peers.start(), peers.start()
    card = source.source(sizes=[SIZE], seed=1)
    reader.reader(sizes=[2 * SIZE], filler=FILLER)
    return source, reader, card


def check_refused(reader: Peer, card: str, runs: list[list[int]], kinds: set[str]) -> str:
    done = reader.read(card=card, runs=runs)
    assert done["kind"] in kinds, done
    assert reader.touched(filler=FILLER) == 0, "bytes of a refused read arrived"
    return str(done["text"])


def check_reads(reader: Peer, card: str) -> None:
    done = reader.read(card=card, runs=[[0, 0, 0, 0, 1000]])
    assert done["kind"] is None, done


def test_memory_beyond_what_the_holder_registered_is_refused_there(
    pair: tuple[Peer, Peer, str],
) -> None:
    """The card claims twice as much: our own check passes, the holder's region does not."""
    _, reader, card = pair

    def claim(read: dict[str, Any]) -> None:
        read["regions"][0]["bytes"] = 2 * SIZE
        memory = read["endpoints"]["mori"]["memories"][0]
        memory["bytes"] = 2 * SIZE
        # MoRI-IO's own descriptor says it too, as far as its reader knows.
        memory["descriptor"] = bytes(memory["descriptor"]).replace(
            SIZE.to_bytes(4, "big"), (2 * SIZE).to_bytes(4, "big")
        )

    runs = [[0, SIZE - 100, 0, 0, 200]]
    text = check_refused(reader, lied(card, claim), runs, {"unreachable"})
    assert "remote MR size mismatch" in text, text
    check_reads(reader, card)


def test_memory_beyond_what_the_descriptor_says_is_refused(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair

    def claim(read: dict[str, Any]) -> None:
        read["regions"][0]["bytes"] = 2 * SIZE
        read["endpoints"]["mori"]["memories"][0]["bytes"] = 2 * SIZE

    runs = [[0, SIZE - 100, 0, 0, 200]]
    text = check_refused(reader, lied(card, claim), runs, {"out_of_bounds"})
    assert "length out of range" in text, text
    check_reads(reader, card)


def test_memory_that_the_holder_does_not_know_is_refused(pair: tuple[Peer, Peer, str]) -> None:
    """A key of a memory that was never registered."""
    _, reader, card = pair

    def claim(read: dict[str, Any]) -> None:
        mori = read["endpoints"]["mori"]
        descriptor = bytes(mori["memories"][0]["descriptor"])
        # The number of the memory follows the engine's key.
        key = descriptor.index(b"hetero_kv-") + len("hetero_kv-") + 32
        assert descriptor[key] < 0x70
        mori["memories"][0]["descriptor"] = (
            descriptor[:key] + bytes([descriptor[key] + 9]) + descriptor[key + 1 :]
        )

    kinds = {"unreachable", "out_of_bounds", "peer_lost"}
    check_refused(reader, lied(card, claim), [[0, 0, 0, 0, 200]], kinds)
    check_reads(reader, card)


def test_another_start_at_the_same_place_is_not_read(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair

    def claim(read: dict[str, Any]) -> None:
        read["endpoints"]["mori"]["lease_page_nonce"] ^= 1

    text = check_refused(reader, lied(card, claim), [[0, 0, 0, 0, 200]], {"incarnation"})
    assert "nonce" in text
    check_reads(reader, card)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("engine", b"\xc1", "cannot be read by amd-mori"),
        ("engine", b"", "descriptor of 0 bytes"),
        ("lease_page", b"x" * 5000, "descriptor of 5000 bytes"),
        ("memories", [], "announces 0 registered memories"),
    ],
)
def test_descriptors_that_are_none_are_refused(
    pair: tuple[Peer, Peer, str], field: str, value: Any, words: str
) -> None:
    _, reader, card = pair

    def claim(read: dict[str, Any]) -> None:
        read["endpoints"]["mori"][field] = value

    text = check_refused(reader, lied(card, claim), [[0, 0, 0, 0, 200]], {"refused", "unreachable"})
    assert words in text, text
    check_reads(reader, card)


def test_a_region_in_no_registered_memory_is_refused(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair

    def claim(read: dict[str, Any]) -> None:
        read["regions"][0]["base"] -= 4096

    text = check_refused(reader, lied(card, claim), [[0, 0, 0, 0, 200]], {"refused"})
    assert "in none of the registered memories" in text


def test_a_source_without_the_endpoint_is_named(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair

    def claim(read: dict[str, Any]) -> None:
        del read["endpoints"]["mori"]

    text = check_refused(reader, lied(card, claim), [[0, 0, 0, 0, 200]], {"unreachable"})
    assert "mori is not offered" in text


START = """
from hetero_kv import _core, mori
import mmap, ctypes
memory = mmap.mmap(-1, 4096)
base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
try:
    _core.MemorySource([(base, 4096)], host=%r, mori=mori.Library())
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"HKV_VERBS_DEVICES": "0"}, "no active RDMA device on this host: bring a port"),
        ({"HKV_VERBS_PORT": "down"}, "no active RDMA device on this host: bring a port"),
        ({"MORI_RDMA_DEVICES": "nope"}, "MORI_RDMA_DEVICES, where it is set, has to name it"),
        ({"MORI_ROCM_SMI_PATH": "/nonexistent/librocm_smi64.so"}, "install rocm-smi-lib"),
        ({"LD_LIBRARY_PATH": ""}, "ROCm 7 is missing or not on the library path"),
    ],
)
def test_what_the_machine_lacks_is_one_line(
    mori_env: MoriEnv, variables: dict[str, str], words: str
) -> None:
    done = mori_env.run(START % "127.0.0.1", **variables)
    told = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    assert done.returncode == 0, done.stderr
    assert len(told) == 1, done.stdout
    assert words in told[0]
    # The package's own way out is a variable that is set for it.
    assert "MORI_DISABLE_AUTO_XGMI" not in told[0]


def test_a_low_limit_of_locked_memory_is_told_before_the_package_ends_the_process(
    mori_env: MoriEnv,
) -> None:
    # A process that may lock as much as it wants is not held to the limit: its right is taken away
    # (prctl(2): PR_CAPBSET_DROP is 24, CAP_IPC_LOCK 14), which an exec makes true.
    limited = """
import ctypes, os, resource, sys
if "again" not in sys.argv:
    assert ctypes.CDLL(None).prctl(24, 14, 0, 0, 0) == 0
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
    os.execv(sys.executable, [sys.executable, "-c", PROGRAM, "again"])
"""
    if os.geteuid() != 0:
        pytest.skip("only root can give the right up for an exec")
    program = limited + START % "127.0.0.1"
    done = mori_env.run(f"PROGRAM = {program!r}\n" + program)
    assert done.returncode == 0, done.stderr
    assert "limit is 4096 (ulimit -l)" in done.stdout, done.stdout
    assert "ulimit -l unlimited" in done.stdout


@pytest.mark.parametrize("host", ["::1", "fd00::1"])
def test_an_address_that_is_not_ipv4_is_refused_by_name(mori_env: MoriEnv, host: str) -> None:
    # The data listener of tcp takes the address; MoRI-IO's does not.
    done = mori_env.run(START % host)
    assert done.returncode == 0, done.stderr
    if host == "::1":
        assert "IPv4 addresses only, and host ::1 has none" in done.stdout, done.stdout
    else:
        assert host in done.stdout


def test_a_missing_package_is_one_line_with_the_way_out(mori_env: MoriEnv) -> None:
    hidden = "import sys; sys.modules['mori'] = None\n"
    done = mori_env.run(hidden + START % "127.0.0.1")
    assert "amd-mori is not installed: pip install 'amd-mori>=1.2.4,<1.3'" in done.stdout


@pytest.mark.parametrize("version", ["1.2.3", "1.3.0", "2.0"])
def test_another_version_is_refused_with_both_ends_of_the_range(
    mori_env: MoriEnv, tmp_path: Path, version: str
) -> None:
    package = tmp_path / "mori"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")
    path = f"{tmp_path}:{mori_env.package}"
    done = mori_env.run(START % "127.0.0.1", PYTHONPATH=path)
    assert f"is version {version}, and this transport is for 1.2.4 to below 1.3" in done.stdout
