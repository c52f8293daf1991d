"""The transport against a bare session of MoRI-IO over the same double, in one run.

By hand (`pytest tests/mori_io/speed.py`) and on a machine with idle cores: three threads of MoRI-IO
spin while it runs, and on two shared cores the same case gave 0.54x and 1.50x. `docs/mori.md` has
every run made so far, also those that failed.
"""

from __future__ import annotations

import statistics

import pytest

from .conftest import Peers
from .harness import FILLER

msgpack = pytest.importorskip("msgspec.msgpack", reason="msgspec reads the card")

# The bar is of time. Of each way the lower quartile counts: what else the machine does only adds.
# Where two series of bare reads, interleaved with ours, differ by more, that is what the run can
# tell.
BAR = 0.9
ROUNDS = 21


def quartile(times: list[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


CASES = {
    "64 MiB": [[0, 0, 0, 0, 64 << 20]],
    "4096 x 16 KiB": [[0, (at * 2053 % 4096) << 14, 0, at << 14, 1 << 14] for at in range(4096)],
    "1024 x 64 KiB": [[0, (at * 517 % 1024) << 16, 0, at << 16, 1 << 16] for at in range(1024)],
}


@pytest.mark.parametrize("case", CASES)
def test_as_fast_as_a_bare_session(
    peers: Peers, case: str, record_property: pytest.RecordProperty
) -> None:
    source, reader = peers.start(), peers.start()
    card = source.source(sizes=[64 << 20], seed=1)
    reader.reader(sizes=[64 << 20], filler=FILLER)
    mori = msgpack.decode(bytes.fromhex(card))["endpoints"]["mori"]
    reader.bare_setup(
        engine=bytes(mori["engine"]).hex(), memory=bytes(mori["memories"][0]["descriptor"]).hex()
    )
    runs = CASES[case]
    bare, ours, again = [], [], []
    for _ in range(ROUNDS):
        bare.append(reader.bare_read(runs=runs))
        ours.append(reader.our_read(card=card, runs=runs))
        again.append(reader.bare_read(runs=runs))
    ratio = quartile(bare + again) / quartile(ours)
    resolved = quartile(bare) / quartile(again)
    resolved = min(resolved, 1 / resolved)
    record_property("ratio", round(ratio, 3))
    print(f"{case}: {ratio:.2f}x a bare session; two series of it differ by {resolved:.2f}x")
    assert ratio >= min(BAR, resolved), (bare, ours, again)
