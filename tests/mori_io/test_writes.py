"""What is written over MoRI-IO: every byte where it belongs, counted under a lease of the target
that stands, and nothing at all where the target's memory or its rights do not allow it."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Peers
from .harness import FILLER, Peer
from .test_refusals import lied
from .test_transfers import scattered

pytest.importorskip("msgspec.msgpack", reason="msgspec writes the cards that lie")

SEED = 7
SOURCES = [1 << 20, 300_001, 4096]
DESTS = [2 << 20, 65_537, 123]


def opened(peers: Peers, **options: Any) -> tuple[Peer, Peer, str]:
    """A target, a writer that has reached it, and the target's card."""
    target, writer = peers.start(), peers.start()
    card = target.target(sizes=DESTS, filler=FILLER)
    writer.writer(sizes=SOURCES, seed=SEED, **options)
    reached = writer.open(card=card)
    assert reached["kind"] is None, reached
    return target, writer, card


@pytest.fixture
def pair(peers: Peers) -> tuple[Peer, Peer, str]:
    return opened(peers)


def wrong(target: Peer, runs: list[list[int]]) -> int:
    return int(target.wrong_bytes(runs=runs, seed=SEED, sizes=SOURCES, filler=FILLER))


def test_scattered_runs_are_written_exactly(pair: tuple[Peer, Peer, str]) -> None:
    target, writer, _ = pair
    runs = scattered(SOURCES, DESTS, 400, 9000, seed=1)
    assert len(runs) > 400
    before = writer.report()["bytes"]
    done = writer.write(runs=runs)
    assert done["kind"] is None, done
    assert wrong(target, runs) == 0
    # Both words of the lease page were read, by work requests; a message is none.
    assert writer.report()["bytes"] - before == sum(run[4] for run in runs) + 16


def test_writes_over_several_queue_pairs_bring_the_same_bytes(peers: Peers) -> None:
    target = peers.start(MORI_IO_QP_PER_TRANSFER="4")
    writer = peers.start(MORI_IO_QP_PER_TRANSFER="4", HKV_VERBS_FAULTS="reorder=1")
    card = target.target(sizes=DESTS, filler=FILLER)
    writer.writer(sizes=SOURCES, seed=SEED)
    assert writer.open(card=card)["kind"] is None
    runs = scattered(SOURCES, DESTS, 1000, 3000, seed=2)
    assert writer.write(runs=runs)["kind"] is None
    assert writer.report()["queue_pairs"] >= 4
    assert wrong(target, runs) == 0


def test_batches_end_once_and_in_the_order_they_were_posted(pair: tuple[Peer, Peer, str]) -> None:
    target, writer, _ = pair
    batches = [
        [[0, at * 64, 0, (batch * 2000 + at) * 64, 63] for at in range(2000)] for batch in range(15)
    ]
    tickets: list[int] = []
    for first in range(0, len(batches), 3):
        for ticket in range(first, first + 3):
            posted = writer.post(ticket=ticket, runs=batches[ticket])
            tickets += [done["ticket"] for done in posted["begun"]["done"]]
        ended = writer.finish(count=first + 3 - len(tickets), patience_s=60)
        assert ended["kind"] is None, ended
        assert all(done["kind"] is None for done in ended["done"])
        tickets += [done["ticket"] for done in ended["done"]]
    assert tickets == list(range(15))
    assert writer.poll(timeout_s=0.2)["done"] == []
    assert wrong(target, [run for runs in batches for run in runs]) == 0


def test_runs_outside_of_either_memory_are_refused_and_not_posted(
    pair: tuple[Peer, Peer, str],
) -> None:
    target, writer, _ = pair
    bad = {
        "destination": [[0, 0, 0, (2 << 20) - 9, 10], [0, 0, 3, 0, 1], [0, 0, 2, 120, 4]],
        "source": [[0, (1 << 20) - 9, 0, 0, 10], [3, 0, 0, 0, 1], [0, 2**64 - 1, 0, 0, 2]],
    }
    for side, runs in bad.items():
        for run in runs:
            posted = writer.post(ticket=1, runs=[[0, 0, 0, 0, 100], run])
            assert posted["kind"] == "out_of_bounds", posted
            assert side in posted["text"], posted
    assert target.touched(filler=FILLER) == 0
    good = [[1, 5, 1, 7, 60_000]]
    assert writer.write(runs=good)["kind"] is None
    assert wrong(target, good) == 0


def test_a_write_under_a_lease_that_does_not_stand_does_not_count(
    pair: tuple[Peer, Peer, str],
) -> None:
    target, writer, _ = pair
    runs = [[0, 0, 0, 0, 100_000]]
    assert target.bump(slot=5, epoch=2)
    assert writer.write(runs=runs, slot=5, epoch=1)["kind"] == "lease_gone"
    assert writer.write(runs=runs, slot=5, epoch=2)["kind"] is None
    assert writer.write(runs=runs, slot=64)["kind"] == "lease_gone"


def test_a_lease_bumped_during_a_slow_write_is_gone(pair: tuple[Peer, Peer, str]) -> None:
    target, writer, _ = pair
    writer.inject(rules="rate=2")
    before = writer.report()["bytes"]
    writer.post(ticket=1, runs=[[0, 0, 0, 0, 1 << 20]])
    assert writer.poll(timeout_s=0.15)["done"] == []
    assert target.bump(slot=0, epoch=2)
    assert before < writer.report()["bytes"] < before + (1 << 20), "the bump came in the middle"
    (done,) = writer.finish(count=1, patience_s=60)["done"]
    assert done["kind"] == "lease_gone", done


def test_memory_beyond_what_the_target_registered_is_refused_there(
    pair: tuple[Peer, Peer, str],
) -> None:
    """The card claims twice as much, as does MoRI-IO's own descriptor: the target's answer does
    not."""
    target, writer, card = pair
    size = DESTS[0]

    def claim(read: dict[str, Any]) -> None:
        read["regions"][0]["bytes"] = 2 * size
        memory = read["endpoints"]["mori"]["memories"][0]
        memory["bytes"] = 2 * size
        memory["descriptor"] = bytes(memory["descriptor"]).replace(
            size.to_bytes(4, "big"), (2 * size).to_bytes(4, "big")
        )

    writer.quiesce()
    writer.writer(sizes=SOURCES, seed=SEED)
    reached = writer.open(card=lied(card, claim))
    assert reached["kind"] == "unreachable", reached
    assert "remote MR size mismatch" in reached["text"], reached
    assert target.touched(filler=FILLER) == 0


def test_memory_beyond_what_the_descriptor_says_is_refused(pair: tuple[Peer, Peer, str]) -> None:
    target, writer, card = pair

    def claim(read: dict[str, Any]) -> None:
        read["regions"][0]["bytes"] = 2 * DESTS[0]
        read["endpoints"]["mori"]["memories"][0]["bytes"] = 2 * DESTS[0]

    assert writer.open(card=lied(card, claim))["kind"] is None
    done = writer.write(runs=[[0, 0, 0, DESTS[0] - 100, 200]])
    assert done["kind"] == "out_of_bounds", done
    assert "length out of range" in done["text"], done
    assert writer.quiesce()["kind"] is None
    assert target.touched(filler=FILLER) == 0


def test_memory_that_peers_may_not_write_is_refused_there(peers: Peers) -> None:
    """MoRI-IO asks for the right to write with every registration, so the double takes it away."""
    target, writer = peers.start(HKV_VERBS_FAULTS="rights=readonly"), peers.start()
    card = target.target(sizes=DESTS, filler=FILLER)
    writer.writer(sizes=SOURCES, seed=SEED)
    # It can be read: the handshake is.
    assert writer.open(card=card)["kind"] is None
    done = writer.write(runs=[[0, 0, 0, 0, 100_000]])
    assert done["kind"] == "out_of_bounds", done
    assert done["text"].startswith("mori write: "), done
    assert writer.quiesce()["kind"] is None
    assert target.touched(filler=FILLER) == 0


def test_a_target_without_notifications_is_refused_by_a_writer_with_them(peers: Peers) -> None:
    target, writer = peers.start(), peers.start()
    card = target.target(sizes=DESTS, filler=FILLER, notifications=False)
    writer.writer(sizes=SOURCES, seed=SEED)
    reached = writer.open(card=card)
    assert reached["kind"] == "refused", reached
    assert "takes no notifications" in reached["text"], reached
    writer.writer(sizes=SOURCES, seed=SEED, notifications=False)
    assert writer.open(card=card)["kind"] is None
    runs = [[0, 0, 0, 0, 100_000]]
    assert writer.write(runs=runs)["kind"] is None
    assert wrong(target, runs) == 0


def test_a_target_that_takes_no_messages_and_says_it_does_ends_in_time(peers: Peers) -> None:
    """The first message stops the queue pair without an error: the handshake's deadline ends it."""
    target, writer = peers.start(), peers.start()
    card = target.target(sizes=DESTS, filler=FILLER, notifications=False)
    writer.writer(sizes=SOURCES, seed=SEED)
    claim = lied(card, lambda read: read["endpoints"]["mori"].update(notifications=True))
    reached = writer.open(card=claim, deadline_s=3.0)
    assert reached["kind"] == "unreachable", reached
    assert "did not answer in time" in reached["text"], reached
    assert target.touched(filler=FILLER) == 0


def test_nothing_is_left_after_close(pair: tuple[Peer, Peer, str]) -> None:
    target, writer, _ = pair
    assert writer.write(runs=[[0, 0, 0, 0, 1000]])["kind"] is None
    assert target.arrived(writer=writer.descriptor(), uids=[0]) is not None
    assert writer.report()["queue_pairs"] > 0
    for peer in (writer, target):
        peer.close()
        assert peer.report()["queue_pairs"] == 0
