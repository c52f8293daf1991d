"""The demo's pure parts: topology, prompts, metrics, and verdicts that can come out false."""

from __future__ import annotations

import dataclasses
import json
import socket
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from hetero_kv.demo.client import Answer
from hetero_kv.demo.engines import EngineError, connector_config, parse_metrics, sum_metric
from hetero_kv.demo.prompts import Prompt, lengths, make_prompts
from hetero_kv.demo.report import (
    Check,
    Row,
    check_control,
    check_held,
    check_pass,
    check_spread,
    make_row,
)
from hetero_kv.demo.run import SOCKET_NAME_BYTES, held_line, make_setup, temporary_folder
from hetero_kv.demo.topology import Shape, parse_topology
from hetero_kv.demo.witness import (
    Allocation,
    Counters,
    Held,
    Load,
    ModelShape,
    Planner,
    Trace,
    read_trace,
)


def test_topology_is_read_and_written_alike() -> None:
    topology = parse_topology("2xdp=1,tp=2,pp=3:tp=1,dp=4")
    assert topology.prefill == Shape(2, 1, 2, 3)
    assert topology.prefill.ranks == 12
    assert topology.decode == Shape(1, 4, 1, 1)
    assert parse_topology(str(topology)) == topology


@pytest.mark.parametrize(
    "text",
    ["", "dp=1,tp=1", "dp=1,tp=1:dp=0,tp=1", "dp=1:tp=1", "dp=1,tp=1:dp=1,tp=1:dp=1,tp=1",
     "dp=1,tp=1,pp=0:dp=1,tp=1", "dp=1,dp=1,tp=1:dp=1,tp=1", "dp=1,pp=2:dp=1,tp=1",
     "0xdp=1,tp=1:dp=1,tp=1", "dp=-1,tp=1:dp=1,tp=1",
     "99xdp=9,tp=9:dp=1,tp=1"],
)  # fmt: skip
def test_a_bad_topology_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"shape|topology|at least|at most"):
        parse_topology(text)


@pytest.mark.parametrize("block", [1, 16, 128])
@pytest.mark.parametrize("count", [1, 2, 6, 16, 40])
def test_lengths_hit_the_edges_of_a_block(block: int, count: int) -> None:
    found = lengths(count, block, 300)
    assert len(found) == count
    assert all(1 <= length <= 300 for length in found)
    if count == 16:
        edges = {1, 2, block - 1, block, block + 1, block * 5 // 2, 300}
        assert {edge for edge in edges if 1 <= edge <= 300} <= set(found)


def test_prompts_share_no_first_token_and_repeat_by_seed() -> None:
    prompts = make_prompts(16, 16, 300, 512, seed=3)
    assert len({prompt.token_ids[0] for prompt in prompts}) == 16
    assert sum(prompt.stream for prompt in prompts) == 8
    assert prompts == make_prompts(16, 16, 300, 512, seed=3)
    assert prompts != make_prompts(16, 16, 300, 512, seed=4)


def test_metrics_are_summed_by_label() -> None:
    page = (
        "# HELP x y\n"
        'reads_total{engine="0",tp="1"} 3.0\n'
        'reads_total{engine="1",tp="1",path="a\\"},b"} 4e0\n'
        "reads_total_created 9\nbad line here\nfree 5\n"
    )
    samples = parse_metrics(page)
    assert sum_metric(samples, "reads_total") == 7
    assert sum_metric(samples, "reads_total", engine="1") == 4
    assert sum_metric(samples, "free") == 5
    assert samples[1].labels["path"] == 'a"},b'


def test_a_plain_engine_has_no_connector() -> None:
    assert connector_config("plain") is None
    config = connector_config("decode", {"lease_s": 3}, "recompute")
    assert config == {
        "kv_connector": "HeteroKVConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"lease_s": 3},
        "kv_load_failure_policy": "recompute",
    }


def test_a_trace_with_a_broken_line_is_no_witness(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert read_trace(trace) == Trace()
    trace.write_text(json.dumps({"event": "load", "req_id": "cmpl-a-0-ff"}) + "\n")
    with pytest.raises(EngineError, match="not a trace event"):
        read_trace(trace)


def test_model_shapes(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256, "vocab_size": 9,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.read(tmp_path) == ModelShape(4, "gqa:8:32", 9)
    config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ModelShape.read(tmp_path).kv == "mla:576"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"config\.json"):
        ModelShape.read(tmp_path)


class TwoHolders:
    """A plan in which both prefill ranks hold what the one decode rank needs; 16-token blocks."""

    def bytes_planned(self, owner_dp: int, decode_dp: int, tokens: int) -> int:
        return 100 * -(-tokens // 16)

    def holders(self, owner_dp: int, decode_dp: int) -> dict[int, set[tuple[int, int]]]:
        return {0: {(0, 0), (0, 1)}}


PLANNER = cast(Planner, TwoHolders())
TOKENS = (5, 6, 7)


def load(index: int, **changes: Any) -> Load:
    honest = Load(
        request_id=f"cmpl-pass-{index:03d}-0-abcd", dp_rank=0, tp_rank=0, pp_rank=0,
        moved_bytes=100, planned_bytes=100, load_ms=1.0, outcome="ok",
        sources=((0, index % 2, 100),),
    )  # fmt: skip
    return dataclasses.replace(honest, **changes)


def row(index: int, tokens: tuple[int, ...] = TOKENS, **changes: Any) -> Row:
    answer = Answer(
        f"pass-{index:03d}", 200, tokens, prompt_tokens=16, cached_tokens=15, total_ms=9.0
    )
    prompt = Prompt(index, tuple(range(16)), stream=False)
    taken = Allocation(f"cmpl-pass-{index:03d}-0-abcd", 15)
    trace = Trace((load(index, **changes),), (taken,))
    return make_row(prompt, answer, TOKENS, trace, PLANNER, (1, 1))


def rows(**changes: Any) -> list[Row]:
    return [row(index, **changes) for index in range(16)]


HONEST = Counters(1600, 240, 16, 0)


def failed(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if not check.ok}


def test_an_honest_pass_holds() -> None:
    assert failed(check_pass(rows(), HONEST)) == set()
    assert failed(check_spread(rows(), PLANNER)) == set()


def test_a_silent_recompute_is_found_by_both_witnesses() -> None:
    prompt = Prompt(0, tuple(range(16)), stream=False)
    answer = Answer("pass-000", 200, TOKENS, prompt_tokens=16, cached_tokens=0)
    recomputed = make_row(prompt, answer, TOKENS, Trace(), PLANNER, (1, 1))
    assert recomputed.equal
    assert failed(check_pass([recomputed], Counters(0, 0, 16, 0))) == {
        "requests", "bytes moved", "prompts that move", "tokens from KV",
        "tokens computed on decode",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"moved_bytes": 99}, {"requests", "bytes moved", "bytes counted"}),
        ({"outcome": "failed"}, {"requests"}),
        ({"tp_rank": 1}, {"requests"}),
        ({"pp_rank": 1}, {"requests"}),
        ({"sources": ((0, 2, 100),)}, {"requests"}),
        ({"sources": ((0, 0, 60), (1, 0, 40))}, {"requests", "bytes moved"}),
    ],
)
def test_a_wrong_load_is_found(changes: dict[str, Any], names: set[str]) -> None:
    assert failed(check_pass(rows(**changes), HONEST)) == names


@pytest.mark.parametrize(
    ("counters", "names"),
    [
        (Counters(1599, 240, 16, 0), {"bytes counted"}),
        (Counters(1600, 239, 16, 0), {"tokens from KV"}),
        (Counters(1600, 240, 17, 0), {"tokens computed on decode"}),
        (Counters(1600, 240, 16, 3), {"tokens computed on decode"}),
    ],
)
def test_a_wrong_counter_is_found(counters: Counters, names: set[str]) -> None:
    assert failed(check_pass(rows(), counters)) == names


def test_unequal_tokens_are_found() -> None:
    assert failed(check_pass(rows(tokens=(5, 6, 8)), HONEST)) == {"tokens"}


def test_reads_from_one_holder_only_are_found() -> None:
    one_sided = rows(sources=((0, 0, 100),))
    assert failed(check_spread(one_sided, PLANNER)) == {"source ranks"}


def test_the_control_must_change_all_but_two() -> None:
    honest, changed = rows(), rows(tokens=(1, 2, 3))
    assert failed(check_control(honest, changed)) == set()
    assert failed(check_control(honest, honest[:2] + changed[2:])) == set()
    assert failed(check_control(honest, honest[:3] + changed[3:])) == {"control: tokens"}
    short = [dataclasses.replace(row, moved_bytes=0) for row in changed]
    assert failed(check_control(honest, short)) == {"control: bytes moved"}
    assert failed(check_control([], [])) == {"control: tokens"}


@pytest.mark.parametrize(
    ("held", "ok", "line"),
    [
        (Held(0, 0, 0.0, 0), True, "blocks still held: 0"),
        (Held(0, 3, 0.0, 0), False, "blocks still held: 3"),
        (Held(1, 0, 0.0, 0), False, "blocks still held: 1"),
        (Held(0, 0, 0.1, 0), False, "blocks still held: 1"),
        (Held(0, 0, 0.0, 1), False, "blocks still held: unknown"),
    ],
)
def test_held(held: Held, ok: bool, line: str) -> None:
    assert check_held(held).ok is ok
    assert held_line(held) == line


@pytest.mark.parametrize("depth", [0, 60])
def test_engines_have_a_temporary_folder_that_ends_with_the_demo(depth: int) -> None:
    with tempfile.TemporaryDirectory() as short:
        logs = Path(short) / ("l" * max(depth, 1))
        logs.mkdir()
        with temporary_folder(logs) as temporary:
            # Where it is deep, a socket beside the logs would have no address.
            assert (temporary.parent == logs) == (depth == 0)
            with socket.socket(socket.AF_UNIX) as left_behind:
                left_behind.bind(str(temporary / ("s" * SOCKET_NAME_BYTES)))
            setup = make_setup(
                parse_topology("2xdp=1,tp=2:dp=2,tp=1"), Path("m"), 1, logs / "t", temporary, {}
            )
            specs = [setup.plain, *setup.pair]
            assert [spec.env["TMPDIR"] for spec in specs] == [str(temporary)] * len(specs)
        assert not temporary.exists()
        assert list(logs.iterdir()) == []
