"""What goes wrong over MoRI-IO: no late byte lands in a block that was handed back, no failure
hangs, and the next read works."""

from __future__ import annotations

import signal
import time

import pytest

from .conftest import Peers
from .harness import FILLER, Peer, PeerError

SEED = 3
SIZE = 24 << 20
WHOLE = [[0, 0, 0, 0, SIZE]]
REFILL = 0x5A


def start(peers: Peers, **reader_options: float) -> tuple[Peer, Peer, str]:
    source, reader = peers.start(), peers.start()
    card = source.source(sizes=[SIZE], seed=SEED)
    reader.reader(sizes=[SIZE], filler=FILLER, **reader_options)
    return source, reader, card


def check_untouched(reader: Peer) -> None:
    """Re-fills what was handed back, waits, and looks."""
    reader.refill(filler=REFILL)
    time.sleep(0.5)
    assert reader.touched(filler=REFILL) == 0, "a late byte landed"


def check_works(reader: Peer, card: str) -> None:
    reader.inject(rules="")
    reader.refill(filler=FILLER)
    done = reader.read(card=card, runs=WHOLE, id=99)
    assert done["kind"] is None, done["text"]
    assert reader.wrong_bytes(runs=WHOLE, seed=SEED, sizes=[SIZE], filler=FILLER) == 0


def test_nothing_arrives_after_a_cancelled_read_is_reported(peers: Peers) -> None:
    _, reader, card = start(peers)
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.inject(rules="rate=40")
    midway = 0
    for attempt in range(4):
        reader.refill(filler=FILLER)
        before = reader.report()["bytes"]
        reader.submit(id=attempt, card=card, runs=WHOLE)
        time.sleep(0.05 + attempt * 0.03)
        assert reader.cancel(id=attempt)
        done = reader.one()
        assert done["kind"] == "cancelled", done
        midway += reader.report()["bytes"] > before
        check_untouched(reader)
    assert midway > 0, "no cancel hit a read in its middle"
    check_works(reader, card)


def test_a_read_that_does_not_end_in_time_costs_the_engine_and_no_byte(peers: Peers) -> None:
    """At 2 MB/s it would take 12 s; patience is 2 s. Its registration is what ends it."""
    _, reader, card = start(peers)
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    regions = reader.report()["regions"]
    reader.inject(rules="rate=2")
    reader.submit(id=1, card=card, runs=WHOLE)
    time.sleep(0.3)
    reader.cancel(id=1)
    begun = time.monotonic()
    assert reader.one()["kind"] == "cancelled"
    assert 1.0 < time.monotonic() - begun < 8.0
    assert reader.report()["regions"] < regions, "still registered"
    check_untouched(reader)
    check_works(reader, card)


def test_a_transfer_that_fails_half_way_is_read_again_and_no_late_byte_lands(peers: Peers) -> None:
    """1500 requests of which the 700th fails; the session tries the read once more."""
    _, reader, card = start(peers)
    runs = [[0, at * 16_384, 0, (1499 - at) * 16_384, 16_000] for at in range(1500)]
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.refill(filler=FILLER)
    reader.inject(rules="read=fatal:after=700:count=1")
    done = reader.read(card=card, runs=runs)
    assert done["kind"] is None, done["text"]
    assert reader.figures()["reconnects"] == 1
    assert reader.wrong_bytes(runs=runs, seed=SEED, sizes=[SIZE], filler=FILLER) == 0


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        ("read=retry:after=100", "peer_lost"),
        ("read=rnr:after=100", "peer_lost"),
        ("read=flush:after=100", "peer_lost"),
        ("read=fatal:after=100", "peer_lost"),
        ("read=access:after=100", "out_of_bounds"),
        ("read=protection:after=100", "local"),
        ("post=enomem:after=100", "peer_lost"),
        ("post=einval:after=100", "peer_lost"),
    ],
)
def test_a_device_that_keeps_failing_fails_the_read_by_name(
    peers: Peers, rules: str, kind: str
) -> None:
    """A post that is refused leaves the requests before it on their way: they may not land late."""
    _, reader, card = start(peers)
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.inject(rules=rules + ";delay=200")
    runs = [[0, at * 16_384, 0, (1499 - at) * 16_384, 16_000] for at in range(1500)]
    done = reader.read(card=card, runs=runs)
    # The second connection may fail in its handshake already.
    assert done["kind"] in (kind, "peer_lost"), done
    assert "mori" in done["text"], done
    check_untouched(reader)
    check_works(reader, card)


def test_memory_that_stays_registered_is_not_handed_back(peers: Peers) -> None:
    _, reader, card = start(peers, quiesce_timeout_s=1.0)
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.break_deregistration(broken=True)
    reader.inject(rules="read=retry:after=0")
    reader.submit(id=1, card=card, runs=WHOLE)
    assert reader.drain(count=1, patience_s=4.0) == [], "handed back unproven"
    assert reader.figures()["unquiesced"] == 1
    assert not reader.shutdown(timeout_s=0.5)
    reader.break_deregistration(broken=False)
    assert reader.one()["kind"] == "peer_lost"
    assert reader.figures()["unquiesced"] == 0
    assert reader.shutdown(timeout_s=10.0)


def test_a_killed_source_is_told_soon_and_its_next_start_is_read(peers: Peers) -> None:
    source, reader, card = start(peers)
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.inject(rules="rate=10")
    reader.submit(id=1, card=card, runs=WHOLE)
    time.sleep(0.2)
    source.kill()
    begun = time.monotonic()
    done = reader.one()
    assert time.monotonic() - begun < 4.0
    assert done["kind"] in ("peer_lost", "unreachable"), done
    check_untouched(reader)
    check_works(reader, peers.start().source(sizes=[SIZE], seed=SEED))


def test_a_stopped_source_fails_in_time_and_the_interpreter_runs_on(peers: Peers) -> None:
    """Before the first connection: its listener's kernel answers, nobody else does."""
    source, reader, card = start(peers)
    source.signal(signal.SIGSTOP)
    reader.start_pulse()
    done = reader.read(card=card, runs=WHOLE)
    longest_s = reader.stop_pulse()
    assert done["kind"] == "unreachable", done
    assert done["ms"] < 6000
    assert longest_s < 0.7, f"Python stood still for {longest_s} s"
    source.signal(signal.SIGCONT)
    check_works(reader, card)


def test_a_source_stopped_between_reads_is_read_all_the_same(peers: Peers) -> None:
    """Its processor takes no part."""
    source, reader, card = start(peers)
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    source.signal(signal.SIGSTOP)
    assert reader.read(card=card, runs=WHOLE)["kind"] is None
    source.signal(signal.SIGCONT)


def test_a_source_that_closed_is_not_read(peers: Peers) -> None:
    """Its keys are gone although its process lives."""
    source, reader, card = start(peers)
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.refill(filler=FILLER)
    source.close()
    done = reader.read(card=card, runs=WHOLE)
    assert done["kind"] in ("out_of_bounds", "peer_lost", "unreachable"), done
    assert reader.touched(filler=FILLER) == 0


def test_two_sources_go_on_when_one_of_them_fails(peers: Peers) -> None:
    one, other, reader = peers.start(), peers.start(), peers.start()
    card = one.source(sizes=[SIZE], seed=SEED)
    other_card = other.source(sizes=[SIZE], seed=SEED, tp_rank=1)
    reader.reader(sizes=[SIZE], filler=FILLER)
    half = SIZE // 2
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    assert reader.read(card=other_card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.refill(filler=FILLER)
    reader.inject(rules="rate=20")
    reader.submit(id=1, card=card, runs=[[0, 0, 0, 0, half]])
    reader.submit(id=2, card=other_card, runs=[[0, half, 0, half, half]])
    time.sleep(0.15)
    other.kill()
    done = {job["id"]: job for job in reader.drain(count=2, patience_s=60)}
    assert done[1]["kind"] is None, done[1]
    assert done[2]["kind"] in ("peer_lost", "unreachable"), done[2]
    check_works(reader, card)


def test_nothing_is_left_after_close(peers: Peers) -> None:
    source, reader, card = start(peers)
    assert reader.read(card=card, runs=WHOLE)["kind"] is None
    assert reader.report()["queue_pairs"] > 0
    assert reader.shutdown(timeout_s=10.0)
    reader.close()
    assert reader.report()["queue_pairs"] == 0
    with pytest.raises(PeerError):
        reader.figures()
    source.close()
    assert source.report()["queue_pairs"] == 0
