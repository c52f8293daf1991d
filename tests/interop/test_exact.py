"""Every byte that a decode rank holds after a load, for pairs of unlike layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .caches import ODD, PADDED, PLAIN, Model, Style
from .conftest import MakeEngine
from .harness import Engine, tokens

GQA = Model(kv_heads=4)
# What vLLM's CPU attention stores: pages that can be cut by block and head only.
OPAQUE = Model(kv_heads=4, parts=1, opaque=True)
MLA = Model(kv_heads=0, parts=1, token_bytes=72)

PAIRS = [
    pytest.param(GQA, 1, 1, PLAIN, PADDED, id="gqa4-1-1"),
    pytest.param(GQA, 1, 2, PADDED, ODD, id="gqa4-1-2"),
    pytest.param(OPAQUE, 2, 1, PADDED, ODD, id="gqa4-2-1-opaque"),
    pytest.param(Model(kv_heads=8), 4, 2, PLAIN, PADDED, id="gqa8-4-2"),
    pytest.param(Model(kv_heads=8), 2, 4, ODD, PLAIN, id="gqa8-2-4"),
    pytest.param(GQA, 8, 1, PLAIN, PADDED, id="gqa4-8-1-replicated"),
    pytest.param(GQA, 1, 8, PADDED, PLAIN, id="gqa4-1-8-replicated"),
    pytest.param(Model(kv_heads=2), 4, 2, ODD, PADDED, id="gqa2-4-2-replicated"),
    pytest.param(Model(kv_heads=2), 8, 4, PLAIN, ODD, id="gqa2-8-4-replicated-twice"),
    pytest.param(MLA, 2, 1, PADDED, PLAIN, id="mla-2-1"),
    pytest.param(MLA, 1, 2, PLAIN, ODD, id="mla-1-2"),
    pytest.param(MLA, 8, 1, ODD, PADDED, id="mla-8-1"),
]

# `make test-rdma` runs these where there is a device.
NEEDS_RDMA = pytest.mark.skipif(
    not any(Path("/sys/class/infiniband").glob("*")), reason="no RDMA device on this host"
)
TRANSPORTS = ["process", "tcp", pytest.param("verbs", marks=NEEDS_RDMA)]

# One token moves nothing; the others end inside, at and behind a block.
PROMPTS = [1, 2, 3, 4, 5, 6, 10, 33]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("model", "tp_p", "tp_d", "style_p", "style_d"), PAIRS)
def test_every_byte(
    make_engine: MakeEngine,
    model: Model,
    tp_p: int,
    tp_d: int,
    style_p: Style,
    style_d: Style,
    transport: str,
) -> None:
    settings = {"transport": transport}
    p = make_engine("p", model, tp_p, producer=True, style=style_p, settings=settings)
    d = make_engine("d", model, tp_d, producer=False, style=style_d, settings=settings)
    for salt, count in enumerate(PROMPTS):
        request = d.decode(p.prefill(tokens(count, salt)))
        if count == 1:
            d.wait_event("local", request.request_id)
            continue
        load = d.loaded(request)
        assert load.ok, load.text
        _check_counts(model, tp_d, load.reports, model.blocks_for(count - 1), transport)
        d.wait_event("finished", request.request_id)
    d.check_bytes()
    # What a producer has handed off, nobody has written.
    p.assert_clean()
    d.assert_clean()


STAGES = [
    pytest.param(GQA, (1, 2), (1, 1), id="gqa-pp2-pp1"),
    pytest.param(GQA, (1, 1), (1, 2), id="gqa-pp1-pp2"),
    pytest.param(GQA, (2, 2), (1, 2), id="gqa-tp2pp2-pp2"),
    pytest.param(Model(kv_heads=4, layers=5), (1, 2), (2, 3), id="gqa-pp2-tp2pp3"),
    pytest.param(Model(kv_heads=0, layers=5, parts=1, token_bytes=72), (2, 3), (1, 2), id="mla"),
    pytest.param(Model(kv_heads=4, layers=4, parts=1, opaque=True), (1, 2), (2, 1), id="opaque"),
]


@pytest.mark.parametrize("transport", ["process", "tcp"])
@pytest.mark.parametrize(("model", "shape_p", "shape_d"), STAGES)
def test_every_byte_over_pipeline_stages(
    make_engine: MakeEngine,
    model: Model,
    shape_p: tuple[int, int],
    shape_d: tuple[int, int],
    transport: str,
) -> None:
    """Shapes are (tp, pp). Layers are found by name in whichever stage has them; every rank of
    both engines reports once, and the lease ends when all ranks of all stages have read."""
    settings = {"transport": transport}
    (tp_p, pp_p), (tp_d, pp_d) = shape_p, shape_d
    p = make_engine("p", model, tp_p, pp_size=pp_p, producer=True, settings=settings)
    d = make_engine("d", model, tp_d, pp_size=pp_d, producer=False, settings=settings)
    for salt, (count, computed) in enumerate([(2, 0), (5, 0), (10, 4), (33, 0), (34, 32)]):
        request = d.decode(p.prefill(tokens(count, salt)), computed=computed)
        load = d.loaded(request)
        assert load.ok, load.text
        assert len(load.reports) == tp_d * pp_d
        layer_bytes = model.head_bytes // model.layers
        for rank, report in enumerate(load.reports):
            held = set(model.layers_of(pp_d, rank // tp_d))
            per_layer = len(model.heads_of(tp_d, rank % tp_d)) * layer_bytes * len(load.dest)
            wanted = {
                stage: per_layer * len(held & set(model.layers_of(pp_p, stage)))
                for stage in range(pp_p)
            }
            got = dict.fromkeys(range(pp_p), 0)
            for source in report["sources"]:
                got[source["pp"]] += source["bytes"]
            assert got == wanted, report
        d.wait_event("finished", request.request_id)
    d.check_bytes()
    p.assert_clean()
    d.assert_clean()


# HND with all tokens of a page in one row, as vLLM's joined caches are described.
ONE_ROW = Style(tokens_outside_heads=False, joint=True, one_row=True, reverse_layers=True)
SIZES = [
    pytest.param(GQA, (1, 16, PLAIN), (1, 32, PADDED), id="gqa-16-32"),
    pytest.param(GQA, (2, 32, ONE_ROW), (1, 16, ODD), id="gqa-32-16"),
    pytest.param(GQA, (1, 16, PADDED), (2, 64, ONE_ROW), id="gqa-16-64"),
    pytest.param(GQA, (1, 64, ONE_ROW), (1, 16, ONE_ROW), id="gqa-64-16-one-row"),
    pytest.param(MLA, (2, 16, ONE_ROW), (1, 32, PLAIN), id="mla-16-32"),
    pytest.param(MLA, (1, 64, ODD), (2, 16, PADDED), id="mla-64-16"),
]


@pytest.mark.parametrize("transport", ["process", "tcp"])
@pytest.mark.parametrize(("model", "side_p", "side_d"), SIZES)
def test_every_byte_between_unlike_block_sizes(
    make_engine: MakeEngine,
    model: Model,
    side_p: tuple[int, int, Style],
    side_d: tuple[int, int, Style],
    transport: str,
) -> None:
    """Sides are (tp, tokens of a block, style). Tokens count from the start of the sequence, also
    behind a prefix hit that ends inside one of prefill's blocks."""
    (tp_p, size_p, style_p), (tp_d, size_d, style_d) = side_p, side_d
    model_p, model_d = replace(model, block_size=size_p), replace(model, block_size=size_d)
    settings = {"transport": transport}
    p = make_engine("p", model_p, tp_p, producer=True, style=style_p, settings=settings)
    d = make_engine("d", model_d, tp_d, producer=False, style=style_d, settings=settings)
    cases = [(2, 0), (16, 0), (17, 0), (18, 0), (65, 0), (66, 0), (100, 0), (130, 64), (200, 128)]
    for salt, (count, computed) in enumerate(cases):
        request = d.decode(p.prefill(tokens(count, salt)), computed=computed)
        load = d.loaded(request)
        assert load.ok, load.text
        held = model_p.blocks_for(count - 1) * size_p
        moved = min(held, computed + len(load.dest) * size_d) - computed
        token_bytes = model.layers * model.parts * model.token_bytes
        for rank, report in enumerate(load.reports):
            wanted = moved * token_bytes * len(model.heads_of(tp_d, rank))
            assert sum(source["bytes"] for source in report["sources"]) == wanted
        d.wait_event("finished", request.request_id)
    d.check_bytes()
    p.assert_clean()
    d.assert_clean()


def test_the_comparison_sees_one_changed_block(make_engine: MakeEngine) -> None:
    """What the other tests rest on."""
    p, d = _pair(make_engine, 1, 2, "tcp")
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    assert load.ok, load.text
    d.check_bytes()
    d.rank_ask(1, "scribble", load.dest[:1])
    with pytest.raises(AssertionError, match=r"d rank 1: .* bytes differ"):
        d.check_bytes()


def _check_counts(
    model: Model, tp_d: int, reports: list[dict[str, object]], blocks: int, transport: str
) -> None:
    for tp_rank, report in enumerate(reports):
        wanted = len(model.heads_of(tp_d, tp_rank)) * model.head_bytes * blocks
        sources = report["sources"]
        assert isinstance(sources, list)
        assert sum(source["bytes"] for source in sources) == report["planned_bytes"] == wanted
        assert {source["transport"] for source in sources} == {transport}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_local_prefix_is_left_alone(make_engine: MakeEngine, transport: str) -> None:
    p, d = _pair(make_engine, 2, 1, transport)
    for salt, (count, computed) in enumerate([(10, 4), (33, 16), (9, 8), (34, 32), (8, 4)]):
        request = d.decode(p.prefill(tokens(count, salt)), computed=computed)
        if computed == count - 1:
            # All that could come from outside is here; the holder only hears that.
            d.wait_event("local", request.request_id)
            continue
        load = d.loaded(request)
        assert load.ok, load.text
        blocks = GQA.blocks_for(count - 1) - computed // GQA.block_size
        assert len(load.dest) == blocks
        assert load.bytes_read == 4 * GQA.head_bytes * blocks
    d.check_bytes()
    p.assert_clean()
    d.assert_clean()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_32_requests_at_once(make_engine: MakeEngine, transport: str) -> None:
    p, d = _pair(make_engine, 2, 4, transport)
    started = [p.start_prefill(tokens(2 + i % 9, i)) for i in range(32)]
    requests = [d.decode(p.finish_prefill(*one)) for one in started]
    loads = [d.loaded(request) for request in requests]
    assert [load.text for load in loads if not load.ok] == []
    d.check_bytes()
    p.assert_clean()
    d.assert_clean()


def test_two_producers(make_engine: MakeEngine) -> None:
    """Each prompt comes from the engine that its params name; their ranks are kept apart."""
    ps = [
        make_engine(f"p{i}", GQA, tp, producer=True, style=style, dp_rank=i)
        for i, (tp, style) in enumerate([(1, PLAIN), (4, ODD)])
    ]
    d = make_engine("d", GQA, 2, producer=False)
    requests = [d.decode(ps[i % 2].prefill(tokens(5 + i, i))) for i in range(8)]
    for i, request in enumerate(requests):
        load = d.loaded(request)
        assert load.ok, load.text
        for report in load.reports:
            assert report["engine"] == f"p{i % 2}"
            assert {source["dp"] for source in report["sources"]} == {i % 2}
    d.check_bytes()
    for engine in [*ps, d]:
        engine.assert_clean()


def test_equal_holders_share_the_reads(make_engine: MakeEngine) -> None:
    p = make_engine("p", MLA, 4, producer=True)
    d = make_engine("d", MLA, 2, producer=False)
    read = [set[int](), set[int]()]
    for salt in range(24):
        load = d.loaded(d.decode(p.prefill(tokens(9, salt))))
        first, second = load.sources
        assert len(first) == len(second) == 1
        assert first != second, "the ranks of one transfer stand on different holders"
        read[0] |= first
        read[1] |= second
    assert read == [{0, 1, 2, 3}] * 2
    d.check_bytes()
    p.assert_clean()
    d.assert_clean()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("model", [MLA, Model(kv_heads=2)], ids=["mla", "gqa"])
def test_a_large_read_is_striped_over_all_holders(
    make_engine: MakeEngine, model: Model, transport: str
) -> None:
    p = make_engine("p", model, 4, producer=True, settings={"transport": transport})
    striped = {"transport": transport, "stripe_bytes_min": 1}
    d = make_engine("d", model, 2, producer=False, settings=striped)
    load = d.loaded(d.decode(p.prefill(tokens(60))))
    assert load.ok, load.text
    # Each rank's heads are on all four ranks with a latent, on two of them with two heads.
    assert load.sources == ([{0, 1, 2, 3}] * 2 if model is MLA else [{0, 1}, {2, 3}])
    # A read of one block cannot be split.
    assert [len(ranks) for ranks in d.loaded(d.decode(p.prefill(tokens(4, 1)))).sources] == [1, 1]
    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()


def test_round_robin_takes_the_holders_in_turn(make_engine: MakeEngine) -> None:
    """RFC #46107: one decode worker, MLA, prefill with one DP and several TP ranks."""
    p = make_engine("p", MLA, 4, producer=True)
    d = make_engine("d", MLA, 1, producer=False, settings={"source_policy": "round_robin"})
    turns = []
    for salt in range(8):
        load = d.loaded(d.decode(p.prefill(tokens(9, salt))))
        assert load.ok, load.text
        turns.append(load.sources)
    assert turns == [[{rank}] for rank in [0, 1, 2, 3, 0, 1, 2, 3]]
    d.check_bytes()


def test_unequal_opaque_pages_are_refused_by_layer(make_engine: MakeEngine) -> None:
    """Handshake fields that hide a difference do not make wrong bytes of it."""
    fields = {"page_format": "hidden"}
    p = make_engine("p", GQA, 1, producer=True, fields=fields)
    d = make_engine("d", Model(kv_heads=4, opaque=True), 1, producer=False, fields=fields)
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    assert load.reasons == {"plan"}
    assert "rows" in load.text
    assert load.bytes_read == 0
    for engine in (p, d):
        engine.assert_clean()


def _pair(make_engine: MakeEngine, tp_p: int, tp_d: int, transport: str) -> tuple[Engine, Engine]:
    settings = {"transport": transport}
    return (
        make_engine("p", GQA, tp_p, producer=True, settings=settings),
        make_engine("d", GQA, tp_d, producer=False, settings=settings),
    )
