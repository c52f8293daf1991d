"""How a target learns of a write over MoRI-IO: after its bytes, by its number, once for ever. What
the wheel does not promise is pinned here too: who builds on it has to know."""

from __future__ import annotations

import signal
import time

import pytest

from .conftest import Peers
from .harness import FILLER, Peer, eventually

msgpack = pytest.importorskip("msgspec.msgpack", reason="msgspec reads the card")

SEED = 5
SIZE = 4 << 20


def start(peers: Peers, **variables: str) -> tuple[Peer, Peer, str]:
    target, writer = peers.start(**variables), peers.start(**variables)
    card = target.target(sizes=[SIZE], filler=FILLER)
    writer.writer(sizes=[SIZE], seed=SEED)
    reached = writer.open(card=card)
    assert reached["kind"] is None, reached
    return target, writer, card


def pieces(first: int, end: int, count: int) -> list[list[int]]:
    """The bytes from ``first`` to ``end`` to the same place, in so many runs."""
    size = (end - first) // count
    return [[0, at, 0, at, size] for at in range(first, end, size)]


@pytest.mark.parametrize("queue_pairs", [1, 4])
def test_a_write_is_told_after_all_of_its_bytes(peers: Peers, queue_pairs: int) -> None:
    target, writer, _ = start(peers, MORI_IO_QP_PER_TRANSFER=str(queue_pairs))
    writer.inject(rules="rate=8;reorder=1")
    uids = writer.post(ticket=1, runs=pieces(0, SIZE, 256))["uids"]
    told = target.watch(writer=writer.descriptor(), uids=uids, offset=0, seed=SEED, patience_s=60.0)
    assert told["told"]
    assert told["wrong"] == 0, "told before its bytes"
    assert told["s"] > 0.2, "nothing was slow"
    (done,) = writer.finish(count=1, patience_s=30.0)["done"]
    assert done["kind"] is None, done


def test_each_write_is_told_by_its_own_number_in_the_order_posted(peers: Peers) -> None:
    target, writer, _ = start(peers)
    key = writer.descriptor()
    writer.inject(rules="rate=8")
    half = SIZE // 2
    (late,) = writer.post(ticket=1, runs=pieces(half, SIZE, 16))["uids"]
    (later,) = writer.post(ticket=2, runs=pieces(0, half, 16))["uids"]
    assert target.arrived(writer=key, uids=[late, later, later + 1000]) == [False, False, False]
    told = target.watch(writer=key, uids=[late], offset=half, seed=SEED, patience_s=60.0)
    assert (told["told"], told.get("wrong")) == (True, 0), told
    assert target.arrived(writer=key, uids=[later]) == [False], "told with the one before"
    told = target.watch(writer=key, uids=[later], offset=0, seed=SEED, patience_s=60.0)
    assert (told["told"], told.get("wrong")) == (True, 0), told
    assert target.arrived(writer=key, uids=[later + 1000]) == [False]
    done = writer.finish(count=2, patience_s=30.0)["done"]
    assert [(batch["ticket"], batch["kind"]) for batch in done] == [(1, None), (2, None)]


def test_a_batch_into_several_memories_has_a_number_for_each(peers: Peers) -> None:
    target, writer = peers.start(), peers.start()
    card = target.target(sizes=[1 << 16, 1 << 16], filler=FILLER)
    writer.writer(sizes=[1 << 16], seed=SEED)
    assert writer.open(card=card)["kind"] is None
    done = writer.write(runs=[[0, 0, 0, 0, 100], [0, 0, 1, 0, 100], [0, 200, 0, 200, 100]])
    assert done["kind"] is None, done
    assert len(set(done["uids"])) == 2
    key = writer.descriptor()
    eventually(lambda: target.arrived(writer=key, uids=done["uids"]) == [True, True])


def test_numbers_are_used_once_also_after_the_connection_is_made_anew(peers: Peers) -> None:
    _, writer, card = start(peers)
    key = writer.descriptor()
    uids = [writer.write(runs=[[0, 0, 0, 0, 8]])["uids"][0] for _ in range(3)]
    assert writer.quiesce()["kind"] is None
    assert writer.open(card=card)["kind"] is None
    assert writer.descriptor() == key, "another engine: the numbers may begin anew"
    uids += [writer.write(runs=[[0, 0, 0, 0, 8]])["uids"][0] for _ in range(3)]
    assert len(set(uids)) == 6


def test_two_writers_with_the_same_number_are_told_apart(peers: Peers) -> None:
    target, writer, card = start(peers)
    other = peers.start()
    other.writer(sizes=[SIZE], seed=SEED)
    assert other.open(card=card)["kind"] is None
    uids = writer.write(runs=[[0, 0, 0, 0, 8]])["uids"]
    eventually(lambda: target.arrived(writer=writer.descriptor(), uids=uids) == [True])
    assert target.arrived(writer=other.descriptor(), uids=uids) == [False]
    assert other.write(runs=[[0, 0, 0, 0, 8]])["uids"] == uids
    eventually(lambda: target.arrived(writer=other.descriptor(), uids=uids) == [True])


def test_a_target_that_was_stopped_is_told_when_it_goes_on(peers: Peers) -> None:
    """Its processor takes no part in the bytes, and its engine's thread takes the message."""
    target, writer, _ = start(peers)
    target.signal(signal.SIGSTOP)
    done = writer.write(runs=pieces(0, SIZE, 64))
    assert done["kind"] is None, done
    target.signal(signal.SIGCONT)
    told = target.watch(
        writer=writer.descriptor(), uids=done["uids"], offset=0, seed=SEED, patience_s=30.0
    )
    assert (told["told"], told.get("wrong")) == (True, 0), told


def test_messages_that_are_not_taken_hold_writes_up_and_none_is_lost(peers: Peers) -> None:
    """Of the wheel: a target's engine has 1,024 messages' room for each queue pair, and its thread
    makes new room. Each batch of ours sends two, one behind its data and one behind its read of the
    lease page."""
    target, writer, _ = start(peers)
    key = writer.descriptor()
    target.signal(signal.SIGSTOP)
    uids: list[int] = []
    held_up = False
    while not held_up:
        at = len(uids)
        posted = writer.post(ticket=at, runs=[[0, at * 8, 0, at * 8, 8]])
        ended = writer.finish(count=1 - len(posted["begun"]["done"]), patience_s=2.0)
        assert ended["kind"] is None, ended
        held_up = not (posted["begun"]["done"] or ended["done"])
        uids += posted["uids"]
        assert len(uids) < 600, "there was room for all"
    assert len(uids) > 500
    target.signal(signal.SIGCONT)
    (last,) = writer.finish(count=1, patience_s=30.0)["done"]
    assert last["kind"] is None, last
    eventually(lambda: all(target.arrived(writer=key, uids=uids)))
    runs = [[0, 0, 0, 0, len(uids) * 8]]
    assert target.wrong_bytes(runs=runs, seed=SEED, sizes=[SIZE], filler=FILLER) == 0


def test_a_message_can_be_lost_behind_bytes_that_came(peers: Peers) -> None:
    """Of the wheel: a write is well when its data is, and nobody looks after its message. So a
    target waits by a deadline of its own, and a writer's success is no word to the target."""
    target, writer, card = start(peers)
    key = writer.descriptor()
    writer.inject(rules="rate=8;send=rnr:count=1")
    uids = writer.post(ticket=1, runs=pieces(0, SIZE, 16))["uids"]
    # The message breaks the queue pair, so the lease page is not read any more and our batch fails.
    ended = writer.finish(count=1, patience_s=30.0)
    assert ended["kind"] == "peer_lost", ended
    assert (
        target.wrong_bytes(runs=[[0, 0, 0, 0, SIZE]], seed=SEED, sizes=[SIZE], filler=FILLER) == 0
    ), "its bytes came"
    time.sleep(0.5)
    assert target.arrived(writer=key, uids=uids) == [False]
    assert writer.quiesce()["kind"] is None
    writer.inject(rules="")
    assert writer.open(card=card)["kind"] is None
    assert writer.write(runs=[[0, 0, 0, 0, 8]])["kind"] is None


def test_a_message_can_be_lost_behind_a_batch_that_counts(peers: Peers) -> None:
    """As above, on a queue pair that the lease page is not read by: all is well on this side."""
    target, writer, _ = start(peers, MORI_IO_QP_PER_TRANSFER="4")
    writer.inject(rules="send=rnr:after=3:count=1")
    done = writer.write(runs=pieces(0, SIZE, 256))
    assert done["kind"] is None, done
    runs = [[0, 0, 0, 0, SIZE]]
    assert target.wrong_bytes(runs=runs, seed=SEED, sizes=[SIZE], filler=FILLER) == 0
    time.sleep(0.5)
    assert target.arrived(writer=writer.descriptor(), uids=done["uids"]) == [False]


def test_a_number_that_is_used_twice_is_told_before_the_second_begins(peers: Peers) -> None:
    """Of the wheel: asking does not take the answer away. This is why numbers are used once; where
    it fails, the package has changed and the rule may go."""
    target, writer, card = start(peers)
    mori = msgpack.decode(bytes.fromhex(card))["endpoints"]["mori"]
    engine = bytes(mori["engine"]).hex()
    memory = bytes(mori["memories"][0]["descriptor"]).hex()
    key = writer.bare_write(card_engine=engine, memory=memory, uid=77)
    eventually(lambda: target.arrived(writer=key, uids=[77]) == [True])
    assert target.arrived(writer=key, uids=[77]) == [True], "asked again"
    target.refill(filler=FILLER)
    writer.inject(rules="rate=2")
    writer.bare_write(card_engine=engine, memory=memory, uid=77)
    assert target.arrived(writer=key, uids=[77]) == [True]
    assert target.count(byte=FILLER) > SIZE // 2, "its bytes were there already"


def test_a_setting_of_the_package_does_not_decide_for_our_engines(peers: Peers) -> None:
    """``MORI_IO_ENABLE_NOTIFICATION`` overrides what an engine is started with."""
    source, reader = peers.start(), peers.start(MORI_IO_ENABLE_NOTIFICATION="1")
    card = source.source(sizes=[SIZE], seed=SEED)
    reader.reader(sizes=[SIZE], filler=FILLER)
    for id in range(3):
        done = reader.read(card=card, runs=[[0, 0, 0, 0, SIZE]], id=id)
        assert done["kind"] is None, done
    assert reader.figures()["reconnects"] == 0
