"""The matrix: unlike layouts on real engines, each with both witnesses and the control.

Two topologies run in ``make test``; all of them in ``make test-vllm``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_kv.demo import run as demo
from hetero_kv.demo.client import complete
from hetero_kv.demo.report import check_control, check_pass, check_spread

from . import matrix_report
from .cluster import Case, Cluster, run_case, short_prompts
from .conftest import References

pytestmark = [pytest.mark.engines, pytest.mark.vllm, pytest.mark.timeout(1200)]

SMALL = (
    Case("gqa", "dp=1,tp=2:dp=2,tp=1"),
    Case("mla", "dp=1,tp=2:dp=2,tp=1"),
)
LARGE = (
    Case("gqa", "dp=1,tp=1:dp=1,tp=1"),
    Case("gqa", "dp=1,tp=2:dp=1,tp=1"),
    Case("gqa", "dp=1,tp=1:dp=1,tp=2"),
    Case("gqa", "dp=2,tp=1:dp=1,tp=2"),
    Case("gqa", "2xdp=1,tp=1:dp=2,tp=1"),
    Case("gqa", "dp=2,tp=2:dp=1,tp=1"),
    Case("gqa", "dp=1,tp=2:dp=1,tp=1", "tcp"),
    Case("gqa", "dp=1,tp=2:dp=2,tp=1", "tcp"),
    Case("gqa", "dp=1,tp=2:dp=2,tp=1", "process"),
    Case("mla", "dp=2,tp=1:dp=1,tp=2"),
    Case("mla", "dp=1,tp=2:dp=1,tp=1", "tcp"),
    Case("mla", "dp=1,tp=2:dp=2,tp=1", "tcp"),
    Case("mla", "dp=1,tp=2:dp=2,tp=1", "process"),
    Case("mla-dense", "dp=1,tp=2:dp=2,tp=1"),
    Case("gqa", "dp=1,tp=2:dp=2,tp=1", "tcp", keyed=True),
    Case("gqa", "dp=1,tp=1,pp=2:dp=1,tp=1"),
    Case("gqa", "dp=1,tp=1:dp=1,tp=1,pp=2"),
)

REQUESTS_IN_A_ROW = 200
GROWTH_BYTES_MAX = 2 << 20
GROWTH_SHARE_MAX = 0.01
IDLE_S = 10.0


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(case, id=case.id) for case in SMALL),
        *(pytest.param(case, id=case.id, marks=pytest.mark.matrix) for case in LARGE),
    ],
)
def cluster(
    request: pytest.FixtureRequest, references: References, engine_logs: Path
) -> Iterator[Cluster]:
    case: Case = request.param
    reference = references.of(case.model)
    with run_case(case, reference, engine_logs / case.id.replace(">", "")) as running:
        yield running
        matrix_report.add(running)


def test_tokens_equal_a_plain_engines_and_both_witnesses_agree(cluster: Cluster) -> None:
    lines = [check.line() for check in check_pass(cluster.honest.rows, cluster.honest.counters)]
    assert not [line for line in lines if line.startswith("FAIL")], "\n".join(lines)
    assert {row.stream for row in cluster.honest.rows} == {True, False}
    assert cluster.transports() == {cluster.case.expected_transport}


def test_prompts_lie_on_the_edges_of_a_block(cluster: Cluster) -> None:
    block = cluster.reference.block_tokens
    sizes = [row.prompt_tokens for row in cluster.honest.rows]
    wanted = {1, 2, block - 1, block, block + 1, block * 5 // 2, 700}
    assert wanted <= set(sizes)
    assert [row.moved_bytes for row in cluster.honest.rows if row.prompt_tokens == 1] == [0]


def test_reads_are_spread_over_all_holders(cluster: Cluster) -> None:
    rows = [*cluster.honest.rows, *cluster.control.rows]
    (check,) = check_spread(rows, cluster.planner)
    assert check.ok, check.line()


def test_every_engine_of_both_sides_takes_part(cluster: Cluster) -> None:
    topology = cluster.case.parsed()
    rows = [row for row in cluster.honest.rows if row.moves]
    assert {row.decode_dp for row in rows} == set(range(topology.decode.dp))
    assert len(cluster.source_engines()) == topology.prefill.instances * topology.prefill.dp


def test_flipped_kv_moves_the_same_bytes_and_changes_the_tokens(cluster: Cluster) -> None:
    lines = [check.line() for check in check_control(cluster.honest.rows, cluster.control.rows)]
    assert not [line for line in lines if line.startswith("FAIL")], "\n".join(lines)


@pytest.mark.matrix
def test_two_hundred_requests_in_a_row_leave_memory_flat(cluster: Cluster) -> None:
    reference = cluster.reference
    quarter: dict[int, int] = {}
    for number, index in enumerate(short_prompts(reference, REQUESTS_IN_A_ROW, seed=3)):
        if number == REQUESTS_IN_A_ROW // 4:
            quarter = cluster.memory()
        name = f"row-{number}"
        answer = complete(
            cluster.port,
            reference.prompts[index],
            demo.COMPLETION_TOKENS,
            name,
            name,
            demo.REQUEST_TIMEOUT_S,
        )
        assert answer.error == ""
        assert answer.token_ids == reference.expected[index], f"request {number}"
    held = cluster.prefill_blocks.settle()
    assert held.nothing, held
    end = cluster.memory()
    assert end.keys() == quarter.keys(), "a process has come or gone"
    cluster.growth_bytes = max(end[pid] - quarter[pid] for pid in end)
    grown = {
        pid: end[pid] - size
        for pid, size in quarter.items()
        if end[pid] - size > max(GROWTH_BYTES_MAX, GROWTH_SHARE_MAX * size)
    }
    assert not grown, f"bytes grown by process: {grown} of {quarter}"


def test_nothing_is_held_at_the_end_nor_after_idling(cluster: Cluster) -> None:
    assert cluster.honest.rows
    for side in (cluster.prefill_blocks, cluster.decode_blocks):
        held = side.settle()
        assert held.nothing, held
    time.sleep(IDLE_S)
    for side in (cluster.prefill_blocks, cluster.decode_blocks):
        held = side.read()
        assert held.nothing, f"after {IDLE_S:.0f} s without a request: {held}"
