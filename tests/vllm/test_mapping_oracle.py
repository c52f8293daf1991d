"""vLLM's own mapping functions as a second opinion on ``hetero-kv plan``.

Every mapping, ours and those of vLLM's connectors, is turned into single copies and judged index by
index (``mapping_judge``); where a connector and the plan differ, the judge says who is right, and
the difference stands here with its reason. MoRIIO is asked in ``test_moriio_oracle.py``.
"""

from __future__ import annotations

import collections
import itertools
import random

import pytest
from mapping_judge import (
    HEADS_MAX,
    TP_SIZES,
    Copies,
    Copy,
    Pair,
    Plan,
    all_plans,
    as_plan,
    divides,
    held,
    judge,
    loads,
    pairs,
    run_plan,
)
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as mooncake
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec

# 0 is MLA's latent.
PAIRS = list(pairs())


@pytest.fixture(scope="module")
def plans() -> dict[Pair, Plan]:
    return all_plans()


def topology(pair: Pair, rank: int, prefill: bool = False) -> TransferTopology:
    """vLLM's view from one decode rank, or from one prefill rank."""
    return TransferTopology(
        tp_rank=rank,
        tp_size=pair.prefill_tp if prefill else pair.decode_tp,
        block_size=16,
        engine_id="here",
        is_mla=pair.heads == 0,
        is_mamba=False,
        total_num_kv_heads=pair.heads or 1,
        attn_backends=[],
    )


# === the plan itself ===


def test_the_plan_is_exact_by_vllms_weight_loader(plans: dict[Pair, Plan]) -> None:
    assert len(plans) > 500
    assert [fault for pair in PAIRS for fault in judge(pair, plans[pair].copies)] == []
    for pair, made in plans.items():
        everyone = set(range(pair.prefill_tp))
        assert set().union(*made.release.values()) == everyone, pair
        for rank in range(pair.decode_tp):
            wanted = set(held(pair.heads, pair.decode_tp, rank))
            holding = {p for p in everyone if wanted & set(held(pair.heads, pair.prefill_tp, p))}
            assert made.holders[rank] == holding, (pair, rank)


def test_the_plan_takes_exactly_the_pairs_that_vllm_can_start() -> None:
    """By loader and NIXL's ratio; heads up to 16, since a refusal repeats beyond."""
    for heads in range(1, 17):
        for prefill_tp, decode_tp in itertools.product(TP_SIZES, TP_SIZES):
            answer = run_plan(f"dp=1,tp={prefill_tp}", f"dp=1,tp={decode_tp}", heads)
            possible = loads(heads, prefill_tp) and loads(heads, decode_tp)
            try:
                topology(Pair(prefill_tp, decode_tp, heads), 0).tp_ratio(prefill_tp)
            except AssertionError:
                possible = False
            assert isinstance(answer, list) == possible, (heads, prefill_tp, decode_tp, answer)
            if not possible:
                field = "kv_heads" if divides(prefill_tp, decode_tp) else "tp_size"
                assert field in answer


def test_data_parallel_ranks_change_the_owner_and_nothing_else(plans: dict[Pair, Plan]) -> None:
    """NIXL names an engine by its address and has no dp in its mapping; so has the plan."""
    draw = random.Random(20)
    for prefill_dp, decode_dp in itertools.product(TP_SIZES, TP_SIZES):
        pair = draw.choice(PAIRS)
        owner = draw.randrange(prefill_dp)
        ranks = run_plan(
            f"dp={prefill_dp},tp={pair.prefill_tp}",
            f"dp={decode_dp},tp={pair.decode_tp}",
            pair.heads,
            *("--owner", str(owner)),
        )
        by_engine = collections.defaultdict(list)
        for row in ranks:
            by_engine[row["dp"]].append(row)
            assert {s["dp"] for s in row["sources"]} | {dp for dp, _ in row["holders"]} == {owner}
        assert set(by_engine) == set(range(decode_dp))
        for rows in by_engine.values():
            made = as_plan(pair, rows)
            assert list(judge(pair, made.copies)) == []
            assert made.holders == plans[pair].holders
            assert made.release == plans[pair].release


# === NIXL ===


def nixl(pair: Pair) -> Copies:
    """Each decode rank takes all of its heads from its source ranks in order: piece ``i`` of the
    block from source ``i``, at an offset in pieces in the source's block."""
    copies: Copies = {}
    for rank in range(pair.decode_tp):
        mapping = compute_tp_mapping(topology(pair, rank), pair.prefill_tp, (FullAttentionSpec,))
        (ranks,) = mapping.source_ranks_per_group
        wanted = len(held(pair.heads, pair.decode_tp, rank))
        piece = wanted // len(ranks)
        copies[rank] = [
            Copy(
                source,
                mapping.rank_offset_factor * piece + index,
                mapping.rank_to_attention_slot[source] * piece + index,
            )
            for source in ranks
            for index in range(piece)
        ]
    return copies


def test_nixl_is_exact_and_reads_what_the_plan_reads(plans: dict[Pair, Plan]) -> None:
    """The two may differ in which of several equal holders is read, and in nothing else: NIXL takes
    the first, or the one of its own place, the plan spreads."""
    for pair in PAIRS:
        theirs, ours = nixl(pair), plans[pair]
        assert list(judge(pair, theirs)) == []
        for rank in range(pair.decode_tp):
            assert {c.prefill_rank for c in theirs[rank]} <= ours.holders[rank], (pair, rank)
            assert len({c.prefill_rank for c in theirs[rank]}) == len(
                {c.prefill_rank for c in ours.copies[rank]}
            ), (pair, rank)
            assert {(c.prefill_index, c.decode_index) for c in theirs[rank]} == {
                (c.prefill_index, c.decode_index) for c in ours.copies[rank]
            }, (pair, rank)


def test_nixl_and_the_plan_end_the_blocks_of_the_same_ranks(plans: dict[Pair, Plan]) -> None:
    """NIXL notifies the ranks it shook hands with, each of which counts ``local_consumers``. A
    decode rank of ours names every holder, so a rank has as many names or more; what both must have
    is that no prefill rank is left out."""
    for pair in PAIRS:
        notified: collections.Counter[int] = collections.Counter()
        consumers = set()
        for rank in range(pair.decode_tp):
            seen = topology(pair, rank)
            targets = seen.handshake_target_ranks(pair.prefill_tp)
            notified.update(targets)
            consumers.add(seen.dcp_consumer_count(pair.prefill_tp, 1))
            assert set(targets) <= plans[pair].release[rank], (pair, rank)
        assert len(consumers) == 1
        assert set(notified.values()) == consumers, pair
        assert set(notified) == set().union(*plans[pair].release.values()), pair


# === Mooncake ===


def mooncake_copies(pair: Pair) -> Copies:
    """Each prefill rank sends to the decode ranks it is paired with; a head is one byte here."""
    copies: Copies = {}
    for rank in range(pair.prefill_tp):
        here = topology(pair, rank, prefill=True)
        for target in here.handshake_target_ranks(pair.decode_tp):
            sends, source, destination, length = mooncake._compute_sender_transfer_plan(
                local_tp_rank=rank,
                local_tp_size=pair.prefill_tp,
                remote_tp_rank=target,
                remote_tp_size=pair.decode_tp,
                local_kv_block_len=len(held(pair.heads, pair.prefill_tp, rank)),
                remote_kv_block_len=len(held(pair.heads, pair.decode_tp, target)),
                producer_cache_replicated=here.local_replicates_kv_cache,
                total_num_kv_heads=pair.heads or None,
            )
            if sends:
                copies.setdefault(target, []).extend(
                    Copy(rank, source + index, destination + index) for index in range(length)
                )
    return copies


def test_mooncake_is_exact_and_writes_from_the_plans_holders(plans: dict[Pair, Plan]) -> None:
    for pair in PAIRS:
        theirs, ours = mooncake_copies(pair), plans[pair]
        assert list(judge(pair, theirs)) == []
        for rank in range(pair.decode_tp):
            assert {c.prefill_rank for c in theirs[rank]} <= ours.holders[rank], (pair, rank)
            assert len(theirs[rank]) == len(ours.copies[rank]), (pair, rank)


def test_the_judge_finds_each_kind_of_fault() -> None:
    """Two heads on two prefill ranks, joined on one decode rank; then each mistake."""
    pair = Pair(2, 1, 2)
    right = {0: [Copy(0, 0, 0), Copy(1, 0, 1)]}
    assert list(judge(pair, right)) == []
    assert max(p.heads for p in PAIRS) == HEADS_MAX
    wrong = {
        "no such prefill rank": [Copy(0, 0, 0), Copy(2, 0, 1)],
        "outside of the 1 heads of its block": [Copy(0, 0, 0), Copy(1, 1, 1)],
        "outside of the 2 heads of decode's block": [Copy(0, 0, 0), Copy(1, 0, 2)],
        "in the place of another": [Copy(1, 0, 0), Copy(0, 0, 1)],
        r"places written \[0\] of 2": [Copy(0, 0, 0)],
        r"places written \[0, 0, 1\] of 2": [Copy(0, 0, 0), Copy(0, 0, 0), Copy(1, 0, 1)],
    }
    for text, copies in wrong.items():
        with pytest.raises(AssertionError, match=text):
            raise AssertionError("; ".join(judge(pair, {0: copies})))
