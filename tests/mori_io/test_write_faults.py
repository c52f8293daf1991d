"""What goes wrong while writing over MoRI-IO: memory that is quiet stays so on both sides, no
failure hangs or is told as arrived, and the next write works."""

from __future__ import annotations

import time

import pytest

from .conftest import Peers
from .harness import FILLER, Peer

SEED = 3
SIZE = 24 << 20
WHOLE = [[0, 0, 0, 0, SIZE]]
REFILL = 0x5A


def start(peers: Peers) -> tuple[Peer, Peer, str]:
    target, writer = peers.start(), peers.start()
    card = target.target(sizes=[SIZE], filler=FILLER)
    writer.writer(sizes=[SIZE], seed=SEED)
    assert writer.open(card=card)["kind"] is None
    return target, writer, card


def check_works(target: Peer, writer: Peer, card: str) -> None:
    writer.inject(rules="")
    target.refill(filler=FILLER)
    writer.fill(seed=SEED)
    reached = writer.open(card=card)
    assert reached["kind"] is None, reached
    done = writer.write(runs=WHOLE)
    assert done["kind"] is None, done
    assert target.wrong_bytes(runs=WHOLE, seed=SEED, sizes=[SIZE], filler=FILLER) == 0
    told = target.watch(
        writer=writer.descriptor(), uids=done["uids"], offset=0, seed=SEED, patience_s=30.0
    )
    assert told["told"], "the next write is not told"


@pytest.mark.parametrize(
    ("rules", "kind", "words"),
    [
        ("write=retry", "peer_lost", "retry counter exceeded"),
        ("write=rnr", "peer_lost", "receiver not ready"),
        ("write=flush", "peer_lost", "flushed"),
        ("write=fatal", "peer_lost", "fatal"),
        ("write=access", "out_of_bounds", "remote access error"),
        ("write=protection", "local", "local protection error"),
        ("post=enomem", "peer_lost", "ibv_post_send"),
    ],
)
def test_a_write_of_one_request_fails_by_name(
    peers: Peers, rules: str, kind: str, words: str
) -> None:
    target, writer, card = start(peers)
    writer.inject(rules=rules)
    done = writer.write(runs=WHOLE)
    assert done["kind"] == kind, done
    assert done["text"].startswith("mori write: "), done
    assert words in done["text"].lower(), done
    assert writer.quiesce()["kind"] is None
    assert target.touched(filler=FILLER) == 0
    check_works(target, writer, card)


@pytest.mark.parametrize(
    "rules",
    [
        "write=retry:after=100",
        "write=fatal:after=100",
        "write=access:after=100",
        "post=enomem:after=100",
        "post=einval:after=100",
    ],
)
def test_a_write_that_fails_half_way_ends_quietly_and_is_never_told(
    peers: Peers, rules: str
) -> None:
    """A post that is refused leaves the requests before it on their way. Of many requests only the
    last reports to MoRI-IO, so whatever the others ran into it is flushed, and the peer is lost."""
    target, writer, card = start(peers)
    key = writer.descriptor()
    writer.inject(rules=rules + ";delay=200")
    done = writer.write(
        runs=[[0, at * 16_384, 0, (1499 - at) * 16_384, 16_000] for at in range(1500)]
    )
    assert done["kind"] == "peer_lost", done
    assert done["text"].startswith("mori write: "), done
    assert writer.quiesce()["kind"] is None
    # What is handed back on this side is read no more, so what comes to stand there cannot show up.
    written = SIZE - target.count(byte=FILLER)
    assert written > 0, "the failure did not come in the middle"
    writer.refill(filler=REFILL)
    shown = target.count(byte=REFILL)
    time.sleep(0.5)
    assert target.count(byte=REFILL) == shown, "a byte of memory that was handed back was written"
    assert target.arrived(writer=key, uids=done["uids"]) == [False]
    check_works(target, writer, card)


def test_a_write_given_up_in_time_was_all_written_and_later_bytes_are_not(peers: Peers) -> None:
    """40 MB/s take 0.6 s; patience is 2 s, so the engine stays."""
    target, writer, card = start(peers)
    # Memory is registered when it is first written from.
    assert writer.write(runs=[[0, 0, 0, 0, 8]])["kind"] is None
    writer.inject(rules="rate=40")
    regions = writer.report()["regions"]
    writer.post(ticket=1, runs=WHOLE)
    time.sleep(0.1)
    assert writer.quiesce()["kind"] is None
    assert writer.report()["regions"] == regions
    writer.refill(filler=REFILL)
    time.sleep(0.3)
    assert target.wrong_bytes(runs=WHOLE, seed=SEED, sizes=[SIZE], filler=FILLER) == 0
    check_works(target, writer, card)


def test_a_write_that_does_not_end_in_time_costs_the_engine_and_is_never_told(peers: Peers) -> None:
    """At 2 MB/s it would take 12 s. The registration on this side is what ends it."""
    target, writer, card = start(peers)
    key = writer.descriptor()
    regions = writer.report()["regions"]
    writer.inject(rules="rate=2")
    uids = writer.post(ticket=1, runs=WHOLE)["uids"]
    time.sleep(0.3)
    begun = time.monotonic()
    assert writer.quiesce()["kind"] is None
    assert 1.0 < time.monotonic() - begun < 8.0
    assert writer.report()["regions"] < regions, "still registered"
    left = target.count(byte=FILLER)
    assert left > SIZE // 8, "it was all written before"
    writer.refill(filler=REFILL)
    shown = target.count(byte=REFILL)
    time.sleep(0.5)
    assert target.count(byte=REFILL) == shown, "read after it was handed back"
    assert target.count(byte=FILLER) == left, "written after it was given up"
    assert target.arrived(writer=key, uids=uids) == [False]
    check_works(target, writer, card)


def test_a_target_that_revokes_is_written_no_more(peers: Peers) -> None:
    """The target asks no writer: once its registrations are gone, its memory is its own."""
    target, writer, _ = start(peers)
    key = writer.descriptor()
    writer.inject(rules="rate=10")
    uids = writer.post(ticket=1, runs=WHOLE)["uids"]
    time.sleep(0.3)
    assert target.touched(filler=FILLER) > 0, "it came before the write"
    target.revoke()
    target.refill(filler=REFILL)
    time.sleep(0.5)
    assert target.touched(filler=REFILL) == 0, "a late byte landed"
    ended = writer.finish(count=1, patience_s=30.0)
    assert ended["kind"] == "out_of_bounds", ended
    assert writer.quiesce()["kind"] is None
    assert target.arrived(writer=key, uids=uids) == [False]
    assert target.touched(filler=REFILL) == 0
    # Its next start is another engine with another card.
    target.close()
    check_works(target, writer, target.target(sizes=[SIZE], filler=FILLER))


def test_memory_that_stays_registered_is_not_called_quiet(peers: Peers) -> None:
    target, writer, card = start(peers)
    writer.break_deregistration(broken=True)
    writer.inject(rules="write=retry")
    assert writer.write(runs=WHOLE)["kind"] == "peer_lost"
    assert writer.quiesce()["kind"] == "not_quiesced"
    writer.break_deregistration(broken=False)
    assert writer.quiesce()["kind"] is None
    check_works(target, writer, card)


def test_a_killed_target_is_told_soon_and_its_next_start_is_written(peers: Peers) -> None:
    target, writer, _ = start(peers)
    writer.inject(rules="rate=10")
    writer.post(ticket=1, runs=WHOLE)
    time.sleep(0.2)
    target.kill()
    begun = time.monotonic()
    ended = writer.finish(count=1, patience_s=30.0)
    assert time.monotonic() - begun < 4.0
    assert ended["kind"] == "peer_lost", ended
    assert writer.quiesce()["kind"] is None
    target = peers.start()
    check_works(target, writer, target.target(sizes=[SIZE], filler=FILLER))
