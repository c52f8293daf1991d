"""MoRIIO's mapping functions as a second opinion on ``hetero-kv plan`` (see ``mapping_judge``).

They are cut out of vLLM's source, whose module imports ``msgpack`` for things unrelated.
``HETERO_KV_VLLM_SOURCE`` may name one more vLLM, a wheel or a folder, to ask as well.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from mapping_judge import (
    TP_SIZES,
    Copies,
    Copy,
    Pair,
    Plan,
    all_plans,
    divides,
    held,
    judge,
    loads,
    pairs,
    run_plan,
)

import vllm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_hooks  # noqa: E402

MORIIO = "vllm/distributed/kv_transfer/kv_connector/v1/moriio"
# 0 is MLA's latent.
PAIRS = list(pairs())


def cut(source: vllm_hooks.Source, file: str, names: set[str], **given: Any) -> SimpleNamespace:
    """Functions, classes and methods of vLLM's source by their names, without its imports."""
    tree = source.tree(f"{MORIIO}/{file}")
    if tree is None:
        pytest.skip(f"vLLM {source.version()} has no {file}")
    wanted = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module(body=[*future, *wanted], type_ignores=[])
    space: dict[str, Any] = {"NamedTuple": NamedTuple, **given}
    exec(compile(module, f"{MORIIO}/{file}", "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names & set(space)})


def sources() -> Iterator[vllm_hooks.Source]:
    yield vllm_hooks.Source(Path(vllm.__file__).parents[1])
    if os.environ.get("HETERO_KV_VLLM_SOURCE"):
        yield vllm_hooks.Source(Path(os.environ["HETERO_KV_VLLM_SOURCE"]))


@pytest.fixture(scope="module", params=sources(), ids=lambda source: source.version())
def source(request: pytest.FixtureRequest) -> vllm_hooks.Source:
    return request.param


@pytest.fixture(scope="module")
def moriio(source: vllm_hooks.Source) -> SimpleNamespace:
    return cut(
        source,
        "moriio_connector.py",
        {
            "get_moriio_remote_tp_rank",
            "get_moriio_read_holder_tp_ranks",
            "validate_moriio_heterogeneous_tp_kv_heads",
            "get_moriio_expected_ack_count",
            "_next_flex_tp_rank",
            "_resolve_read_source",
        },
    )


@pytest.fixture(scope="module")
def plans() -> dict[Pair, Plan]:
    return all_plans()


def moriio_takes(moriio: SimpleNamespace, pair: Pair) -> bool:
    try:
        moriio.validate_moriio_heterogeneous_tp_kv_heads(
            pair.decode_tp, pair.prefill_tp, pair.heads or 1, pair.heads == 0
        )
    except NotImplementedError:
        return False
    return True


def moriio_source(moriio: SimpleNamespace, pair: Pair, rank: int) -> int:
    return moriio.get_moriio_remote_tp_rank(rank, pair.decode_tp, pair.prefill_tp)


def test_moriio_reads_a_holder_of_the_plan_where_it_reads_at_all(
    moriio: SimpleNamespace, plans: dict[Pair, Plan]
) -> None:
    """MoRIIO reads whole blocks of one rank. That is right where it takes the pair; the pairs it
    refuses are those in which a rank's heads are split or joined, which the plan does exactly
    (``test_the_plan_is_exact_by_vllms_weight_loader``)."""
    refused = []
    for pair in PAIRS:
        if not moriio_takes(moriio, pair):
            refused.append(pair)
            continue
        copies: Copies = {}
        for rank in range(pair.decode_tp):
            source = moriio_source(moriio, pair, rank)
            assert source in plans[pair].holders[rank], (pair, rank)
            share = len(held(pair.heads, pair.decode_tp, rank))
            copies[rank] = [Copy(source, index, index) for index in range(share)]
        assert list(judge(pair, copies)) == []
    assert all(pair.heads > min(pair.prefill_tp, pair.decode_tp) for pair in refused)
    assert Pair(4, 8, 8) in refused
    assert Pair(8, 4, 2) not in refused


def test_moriio_refuses_indivisible_sizes_as_the_plan_does(moriio: SimpleNamespace) -> None:
    for prefill_tp, decode_tp in itertools.product(TP_SIZES, TP_SIZES):
        answer = run_plan(f"dp=1,tp={prefill_tp}", f"dp=1,tp={decode_tp}", 0)
        if divides(prefill_tp, decode_tp):
            assert isinstance(answer, list)
            continue
        assert f"producer {prefill_tp}, consumer {decode_tp}" in answer
        with pytest.raises(ValueError, match="must be a multiple of"):
            moriio.get_moriio_remote_tp_rank(0, decode_tp, prefill_tp)


def test_moriio_takes_heads_that_vllm_cannot_load_and_the_plan_refuses_them(
    moriio: SimpleNamespace,
) -> None:
    """MoRIIO looks at the smaller tp size only: 3 heads on 4 and 8 ranks pass. Such an engine does
    not start, so the plan's refusal is right."""
    pair = Pair(4, 8, 3)
    assert moriio_takes(moriio, pair)
    assert not loads(3, 4)
    assert "kv_heads: producer tp_size 4 and 3 KV heads" in run_plan("dp=1,tp=4", "dp=1,tp=8", 3)


def test_moriio_leaves_holders_unreleased_before_it_names_them_all(
    moriio: SimpleNamespace, plans: dict[Pair, Plan]
) -> None:
    """Up to 0.32 only the rank that was read is released, and vLLM frees a request's blocks when
    all ranks have reported: the others stay pinned until a timer. From 0.33 on MoRIIO releases
    every holder (``get_moriio_read_holder_tp_ranks``). Ours is the union, which is the group."""
    left_out = {}
    for pair in PAIRS:
        if not moriio_takes(moriio, pair):
            continue
        released: set[int] = set()
        for rank in range(pair.decode_tp):
            if hasattr(moriio, "get_moriio_read_holder_tp_ranks"):
                released |= set(
                    moriio.get_moriio_read_holder_tp_ranks(rank, pair.decode_tp, pair.prefill_tp)
                )
            else:
                released.add(moriio_source(moriio, pair, rank))
        left_out[pair] = set().union(*plans[pair].release.values()) - released
    if hasattr(moriio, "get_moriio_read_holder_tp_ranks"):
        assert set().union(*left_out.values()) == set()
    else:
        assert left_out[Pair(8, 1, 0)] == {1, 2, 3, 4, 5, 6, 7}
        assert all(bool(left) == (p.prefill_tp > p.decode_tp) for p, left in left_out.items())


def test_moriio_counts_as_many_acknowledgements_as_ranks_read_a_rank(
    moriio: SimpleNamespace,
) -> None:
    """Its count is right for its own fixed sources. It stays a count: the plan needs none, because
    a producer keeps the set of the ranks that acknowledged (``a_rank_counts_once``)."""
    for pair in PAIRS:
        readers = collections.Counter(
            moriio_source(moriio, pair, rank) for rank in range(pair.decode_tp)
        )
        expected = moriio.get_moriio_expected_ack_count(pair.prefill_tp, pair.decode_tp)
        assert set(readers.values()) == {expected}, pair


def test_moriios_flexible_source_is_a_holder_and_goes_round(
    moriio: SimpleNamespace, plans: dict[Pair, Plan]
) -> None:
    """Its gate: decode on one rank, MLA, one prefill DP rank, several prefill TP ranks."""
    for pair, dp_rank, prefill_dp in itertools.product(
        [pair for pair in PAIRS if pair.heads in (0, 1, 8)], (0, 3), (1, 2)
    ):
        worker = SimpleNamespace(
            world_size=pair.decode_tp,
            use_mla=pair.heads == 0,
            dp_rank=dp_rank,
            _remote_tp_rank=lambda size, pair=pair: moriio.get_moriio_remote_tp_rank(
                0, pair.decode_tp, size
            ),
            _spreads_replicated_reads=lambda: True,
        )
        worker._next_flex_tp_rank = lambda size, worker=worker: moriio._next_flex_tp_rank(
            worker, size
        )
        asked = SimpleNamespace(tp_size=pair.prefill_tp, remote_dp_size=prefill_dp)
        picks = [moriio._resolve_read_source(worker, asked) for _ in range(2 * pair.prefill_tp)]
        gate = pair.decode_tp == 1 and pair.heads == 0 and prefill_dp == 1 and pair.prefill_tp > 1
        assert {flexible for _, flexible in picks} == {gate}
        chosen = [rank for rank, _ in picks]
        if gate:
            assert chosen == [(dp_rank + turn) % pair.prefill_tp for turn in range(len(picks))]
            assert set(chosen) == plans[pair].holders[0]
        else:
            # One rank for ever, though the plan may have the choice: a prefill engine of several
            # DP ranks spreads over the owner's holders as well.
            assert len(set(chosen)) == 1
            assert set(chosen) <= plans[pair].holders[0]


def test_round_robin_reads_the_ranks_that_moriio_reads(moriio: SimpleNamespace) -> None:
    """The policy of the RFC, for comparison: the same rank for the same turn behind the gate, and
    its fixed mapping elsewhere, on every rank of four decode engines."""
    seen = set()
    for pair, prefill_dp, sequence in itertools.product(
        [p for p in PAIRS if p.heads in (0, 1, 2) and moriio_takes(moriio, p)], (1, 2), (0, 1, 9)
    ):
        ranks = run_plan(
            f"dp={prefill_dp},tp={pair.prefill_tp}",
            f"dp=4,tp={pair.decode_tp}",
            pair.heads,
            *("--policy", "round_robin", "--sequence", str(sequence)),
        )
        assert isinstance(ranks, list), ranks
        for row in ranks:
            worker = SimpleNamespace(
                world_size=pair.decode_tp,
                use_mla=pair.heads == 0,
                _flex_tp_rr=row["dp"] + sequence,
                _remote_tp_rank=lambda size, row=row, pair=pair: moriio.get_moriio_remote_tp_rank(
                    row["tp"], pair.decode_tp, size
                ),
                _spreads_replicated_reads=lambda: True,
            )
            worker._next_flex_tp_rank = lambda size, worker=worker: moriio._next_flex_tp_rank(
                worker, size
            )
            asked = SimpleNamespace(tp_size=pair.prefill_tp, remote_dp_size=prefill_dp)
            chosen, flexible = moriio._resolve_read_source(worker, asked)
            # Head by head: several of one rank's are several sources of one rank.
            assert {s["tp"] for s in row["sources"]} == {chosen}, (pair, prefill_dp, row)
            seen.add(flexible)
    assert seen == {False, True}


def test_moriios_ports_collide_where_dp_and_tp_are_both_above_one(
    source: vllm_hooks.Source,
) -> None:
    """Its listeners count ranks with a tp size of 1, its readers with the true one (#52014): (dp 0,
    tp 1) and (dp 1, tp 0) share a port, and a reader may dial another rank. Here nothing is
    computed: a listener takes a free port and announces it, and ranks are fields of messages."""
    offset = cut(source, "moriio_common.py", {"get_port_offset"}).get_port_offset
    for dp, tp in itertools.product((1, 2, 4), (1, 2, 4)):
        ranks = list(itertools.product(range(dp), range(tp)))
        listened = {offset(*rank) for rank in ranks}
        dialled = {offset(*rank, tp) for rank in ranks}
        assert dialled == set(range(dp * tp))
        assert (len(listened) < len(ranks)) == (dp > 1 and tp > 1)


def test_moriios_writers_write_what_the_plan_reads(
    source: vllm_hooks.Source, plans: dict[Pair, Plan]
) -> None:
    names = {
        "WriteTarget",
        "MoRIIOWriteTPMapping",
        "_rank_heads",
        "validate_write_tp_topology",
        "_producer_targets",
        "compute_write_tp_mapping",
    }
    space = {"dataclass": dataclasses.dataclass, "cache": functools.cache}
    theirs = cut(source, "moriio_tp_mapping.py", names, **space)
    for pair in PAIRS:
        copies: Copies = {}
        writers: collections.Counter[int] = collections.Counter()
        told: dict[int, set[int]] = collections.defaultdict(set)
        for rank in range(pair.prefill_tp):
            mapping = theirs.compute_write_tp_mapping(
                rank, pair.prefill_tp, pair.decode_tp, pair.heads, pair.heads == 0, False
            )
            for target in mapping.targets:
                writers[target.tp_rank] += 1
                told[target.tp_rank].add(target.num_writers)
                copies.setdefault(target.tp_rank, []).extend(
                    Copy(rank, target.local_head + index, target.remote_head + index)
                    for index in range(target.num_heads)
                )
        assert list(judge(pair, copies)) == []
        for rank in range(pair.decode_tp):
            assert told[rank] == {writers[rank]}
            assert {c.prefill_rank for c in copies[rank]} <= plans[pair].holders[rank]
            assert len({c.prefill_rank for c in copies[rank]}) == len(
                {c.prefill_rank for c in plans[pair].copies[rank]}
            )
