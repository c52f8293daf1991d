"""What a read over MoRI-IO brings: every byte where it belongs, under a lease that stands."""

from __future__ import annotations

import random

import pytest

from .conftest import Peers
from .harness import FILLER, Peer

SEED = 7
SIZES = [1 << 20, 300_001, 4096]


def scattered(
    sources: list[int], dests: list[int], count: int, largest: int, seed: int
) -> list[list[int]]:
    """Runs from anywhere to destinations that do not overlap, in any order."""
    choice = random.Random(seed)
    runs = []
    for dest, size in enumerate(dests):
        at = choice.randrange(1, 64)
        while len(runs) < count * (dest + 1):
            length = choice.randint(1, largest)
            if at + length > size:
                break
            source = choice.randrange(len(sources))
            length = min(length, sources[source])
            start = choice.randint(0, sources[source] - length)
            runs.append([source, start, dest, at, length])
            at += length + choice.choice((0, 0, 1, 3, 17))
    choice.shuffle(runs)
    return runs


@pytest.fixture
def pair(peers: Peers) -> tuple[Peer, Peer, str]:
    """A source, a reader, and the source's card."""
    source, reader = peers.start(), peers.start()
    card = source.source(sizes=SIZES, seed=SEED)
    reader.reader(sizes=[2 << 20, 65_537, 123], filler=FILLER)
    return source, reader, card


def test_scattered_runs_arrive_exactly(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair
    runs = scattered(SIZES, [2 << 20, 65_537, 123], 400, 9000, seed=1)
    assert len(runs) > 400
    done = reader.read(card=card, runs=runs)
    assert done["kind"] is None, done
    assert done["transport"] == "mori"
    assert done["bytes"] == sum(run[4] for run in runs)
    assert reader.wrong_bytes(runs=runs, seed=SEED, sizes=SIZES, filler=FILLER) == 0


def test_completions_in_another_order_bring_the_same_bytes(peers: Peers) -> None:
    source = peers.start()
    reader = peers.start(MORI_IO_QP_PER_TRANSFER="4", HKV_VERBS_FAULTS="reorder=1")
    card = source.source(sizes=SIZES, seed=SEED)
    reader.reader(sizes=[2 << 20], filler=FILLER)
    runs = scattered(SIZES, [2 << 20], 1000, 3000, seed=2)
    assert reader.read(card=card, runs=runs)["kind"] is None
    assert reader.report()["queue_pairs"] >= 4
    assert reader.wrong_bytes(runs=runs, seed=SEED, sizes=SIZES, filler=FILLER) == 0


def test_ten_thousand_tiny_runs_arrive_exactly(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair
    runs = [[0, (at * 7919) % (1 << 20) // 8 * 8, 0, at * 9, 8] for at in range(10_000)]
    done = reader.read(card=card, runs=runs)
    assert done["kind"] is None, done
    assert reader.wrong_bytes(runs=runs, seed=SEED, sizes=SIZES, filler=FILLER) == 0


def test_all_runs_of_a_large_model_arrive_exactly(pair: tuple[Peer, Peer, str]) -> None:
    """80 layers of 256 blocks, none beside another on either side."""
    _, reader, card = pair
    runs = [[0, at * 7919 % 20_480 * 48, 0, at * 48, 40] for at in range(20_480)]
    done = reader.read(card=card, runs=runs)
    assert done["kind"] is None, done
    assert reader.wrong_bytes(runs=runs, seed=SEED, sizes=SIZES, filler=FILLER) == 0


def test_sixty_four_jobs_at_once_are_each_done_once(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair
    runs = [[0, at * 1234, 0, at * 30_000, 29_999] for at in range(64)]
    for id, run in enumerate(runs):
        reader.submit(id=id, card=card, runs=[run])
    done = reader.drain(count=64, patience_s=60)
    assert sorted(job["id"] for job in done) == list(range(64))
    assert all(job["kind"] is None for job in done)
    assert reader.drain(count=1, patience_s=0.2) == []
    assert reader.wrong_bytes(runs=runs, seed=SEED, sizes=SIZES, filler=FILLER) == 0
    assert reader.figures()["jobs_in_flight"] == 0


def test_runs_outside_of_either_memory_fail_their_job_only(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair
    bad = [
        [0, (1 << 20) - 9, 0, 0, 10],
        [3, 0, 0, 0, 1],
        [0, 2**64 - 1, 0, 0, 2],
        [0, 0, 2, 120, 4],
        [0, 0, 3, 0, 1],
        [0, 0, 0, 0, 0],
    ]
    for id, run in enumerate(bad):
        reader.submit(id=id, card=card, runs=[[0, 0, 0, 0, 100], run])
    good = [[1, 5, 1, 7, 60_000]]
    reader.submit(id=100, card=card, runs=good)
    for job in reader.drain(count=len(bad) + 1, patience_s=60):
        assert job["kind"] == (None if job["id"] == 100 else "out_of_bounds"), job
    assert reader.wrong_bytes(runs=good, seed=SEED, sizes=SIZES, filler=FILLER) == 0


def test_a_lease_that_does_not_stand_is_gone(pair: tuple[Peer, Peer, str]) -> None:
    source, reader, card = pair
    runs = [[0, 0, 0, 0, 100_000]]
    assert source.bump(slot=5, epoch=2)
    assert reader.read(card=card, runs=runs, slot=5, epoch=1)["kind"] == "lease_gone"
    assert reader.read(card=card, runs=runs, slot=5, epoch=2)["kind"] is None
    assert reader.read(card=card, runs=runs, slot=6, epoch=1)["kind"] is None
    for epoch in (0, 2, 2**64 - 1):
        assert reader.read(card=card, runs=runs, slot=6, epoch=epoch)["kind"] == "lease_gone"
    for slot in (64, 2**32 - 1):
        assert reader.read(card=card, runs=runs, slot=slot)["kind"] == "lease_gone"
    # No lease that is gone costs the connection.
    assert reader.figures()["reconnects"] == 0


def test_a_lease_bumped_during_a_slow_read_is_gone(pair: tuple[Peer, Peer, str]) -> None:
    source, reader, card = pair
    runs = [[0, 0, 0, 0, 1 << 20]]
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    reader.inject(rules="rate=2")
    reader.submit(id=2, card=card, runs=runs)
    before = reader.report()["bytes"]
    assert reader.drain(count=1, patience_s=0.15) == []
    assert source.bump(slot=0, epoch=2)
    source.fill(seed=99)
    assert reader.report()["bytes"] > before, "the bump came in the middle"
    assert reader.one()["kind"] == "lease_gone"


def test_the_lease_page_is_read_after_the_data(pair: tuple[Peer, Peer, str]) -> None:
    """Each batch is one post for the data and one for the page, in that order: posts behind each
    other on one queue pair would not be enough."""
    _, reader, card = pair
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    before = reader.report()
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 1 << 20]])["kind"] is None
    after = reader.report()
    assert after["posts"] - before["posts"] == 2
    assert after["bytes"] - before["bytes"] == (1 << 20) + 16


def test_an_idle_session_takes_no_processor_time(pair: tuple[Peer, Peer, str]) -> None:
    _, reader, card = pair
    assert reader.read(card=card, runs=[[0, 0, 0, 0, 8]])["kind"] is None
    used = reader.our_cpu_s(seconds=3.0)
    assert used, "the session's thread is there"
    # A tenth of a percent of the time; MoRI-IO's own thread spins and is not ours.
    assert sum(used.values()) < 0.003, used
