"""Scenarios of other connectors' tests that no other test of ours shows (``peer_scenarios.md``)."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import contract_engine
from contract_engine import (
    BLOCK_SIZE,
    PROMPT,
    SAMPLED_TOKEN,
    Engine,
    assert_nothing_held,
    drain,
    engines,
    prefill,
    run_until,
)
from hetero_kv.connector import HeteroKVConnector
from hetero_kv.stats import key

pytestmark = pytest.mark.vllm


def pair(folder: Path, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> Any:
    """One prefill and one decode engine; no lease ends by its time."""
    lasting = {"settings": {"lease_s": 3600}}
    return engines((folder, "kv_producer", lasting | (p or {})), (folder, "kv_consumer", d or {}))


def count_sendings(engine: Engine) -> Counter[tuple[int, str]]:
    """How often each rank names each request in ``finished_sending``, from now on."""
    counts: Counter[tuple[int, str]] = Counter()

    def look(outputs: list[Any]) -> list[Any]:
        for rank, output in enumerate(outputs):
            reported = output.kv_connector_output
            for request_id in (reported.finished_sending if reported else None) or ():
                counts[rank, request_id] += 1
        return outputs

    engine.tamper = look
    return counts


# Four heads: 8 ranks hold each of them twice.
@pytest.mark.parametrize(
    ("tp_p", "tp_d"),
    [(1, 2), (2, 4), (2, 1), (4, 2), (1, 4), (4, 1), (8, 1), (8, 4), (4, 8), (8, 8)],
)
def test_every_rank_frees_once_whoever_was_read(config_folder: Path, tp_p: int, tp_d: int) -> None:
    with pair(config_folder, {"tp": tp_p}, {"tp": tp_d}) as (p, d):
        sendings = count_sendings(p)
        requests = [f"p{n}" for n in range(4)]
        for n, request_id in enumerate(requests):
            prompt = [token + n for token in PROMPT]
            d.add(f"d{n}", prompt, prefill(p, request_id, prompt), max_tokens=2)
            run_until(lambda n=n: f"d{n}" in d.scheduled, p, d)
            blocks = d.blocks_of(f"d{n}")
            assert all(worker.holds(prompt, blocks) for worker in d.workers)
        drain(p, d)
        assert sendings == Counter({(rank, r): 1 for rank in range(tp_p) for r in requests})
        assert p.figures()["counters"]["leases_read_out"] == 4
        assert_nothing_held(p, d)


@pytest.mark.parametrize("when", ["before it has blocks", "while it loads"])
@pytest.mark.parametrize(("tp_p", "tp_d"), [(4, 2), (8, 1), (2, 4)])
def test_an_aborted_read_frees_every_rank_once(
    config_folder: Path, tp_p: int, tp_d: int, when: str
) -> None:
    with pair(config_folder, {"tp": tp_p}, {"tp": tp_d}) as (p, d):
        sendings = count_sendings(p)
        d.add("d0", PROMPT, prefill(p))
        if when == "while it loads":
            d.step()
        d.abort("d0")
        drain(p, d)
        assert sendings == Counter({(rank, "p0"): 1 for rank in range(tp_p)})
        assert_nothing_held(p, d)


def test_a_prompt_in_chunks_is_offered_once_at_its_end(config_folder: Path) -> None:
    with pair(config_folder, {"max_num_batched_tokens": 32}) as (p, d):
        params = prefill(p)
        assert p.scheduled["p0"] == [32, 32, 32, 4]
        ((held, answered),) = p.calls("request_finished_all_groups", "p0")
        assert held
        assert answered["remote_num_tokens"] == len(PROMPT)
        d.add("d0", PROMPT, params, max_tokens=2)
        run_until(lambda: "d0" in d.scheduled, p, d)
        assert d.workers[0].holds(PROMPT, d.blocks_of("d0"))
        drain(p, d)
        assert_nothing_held(p, d)


def test_blocks_beyond_the_prompt_are_not_offered(config_folder: Path) -> None:
    """A router that lets prefill generate on: the blocks of what it generated stay out."""
    with pair(config_folder) as (p, d):
        tables = []
        p.add("p0", PROMPT, {"do_remote_decode": True}, max_tokens=40)
        while "p0" not in p.answers:
            p.step()
            if "p0" in p.scheduler.requests and "p0" not in p.answers:
                tables.append(p.blocks_of("p0"))
        params = p.answers["p0"]
        assert params is not None
        assert len(tables[-1]) == 9
        assert params["remote_block_ids"] == [tables[-1][: -(-len(PROMPT) // BLOCK_SIZE)]]
        d.add("d0", PROMPT, params, max_tokens=2)
        run_until(lambda: "d0" in d.scheduled, p, d)
        assert d.calls("get_num_new_matched_tokens", "d0") == [(len(PROMPT) - 1, True)]
        assert d.workers[0].holds(PROMPT, d.blocks_of("d0"))
        drain(p, d)
        assert_nothing_held(p, d)


def test_a_prefill_that_its_first_token_ends_is_handed_off(config_folder: Path) -> None:
    """The first token is a stop token (or EOS): the prompt's KV is as good as any."""
    with pair(config_folder) as (p, d):
        request = p.add("p0", PROMPT, {"do_remote_decode": True}, max_tokens=5)
        request.sampling_params.stop_token_ids = [SAMPLED_TOKEN]
        run_until(lambda: "p0" in p.answers, p)
        assert p.outcomes["p0"] == "stop"
        params = p.answers["p0"]
        assert params is not None
        d.add("d0", PROMPT, params, max_tokens=2)
        run_until(lambda: "d0" in d.scheduled, p, d)
        assert d.calls("get_num_new_matched_tokens", "d0") == [(len(PROMPT) - 1, True)]
        drain(p, d)
        assert_nothing_held(p, d)


def test_the_answer_names_the_rank_that_ran_it_and_where_it_listens(
    config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 11 of 16, the fourth of the second host's eight: its global index goes along for keys
    and metrics; the address is its own listener's and computed from nothing."""
    make_config = contract_engine.make_config

    def eleventh(model: Path, role: str, **options: Any) -> Any:
        config = make_config(model, role, **options)
        if role == "kv_producer":
            config.parallel_config.data_parallel_index = 11
        return config

    monkeypatch.setattr(contract_engine, "make_config", eleventh)
    with pair(config_folder, d={"log_stats": True}) as (p, d):
        params = prefill(p)
        assert params["remote_dp_rank"] == 11
        assert params["remote_host"] == "127.0.0.1"
        assert params["remote_port"] == p.connector._scheduler._core.port
        d.add("d0", PROMPT, params, max_tokens=2)
        drain(p, d)
        assert_nothing_held(p, d)
        engine_id = p.config.kv_transfer_config.engine_id
        wanted = key("hetero_kv_bytes_read", engine_id, "11", "0").removesuffix("]")
        series = [name for stats in d.stats for name in stats["counters"] if "bytes_read" in name]
        assert series
        assert all(name.startswith(wanted) for name in series)


def test_claims_are_answered_while_the_interpreter_lock_is_held(config_folder: Path) -> None:
    """What a separate heartbeat process is for elsewhere: a long step that keeps the interpreter
    lock. Both engines' control threads live in this process and never need it."""
    with pair(config_folder, {"settings": {"lease_s": 2.0, "grace_ms": 0}}) as (p, d):
        params = prefill(p)
        d.add("d0", PROMPT, params, max_tokens=2)
        # `PyDLL` keeps the lock during the call, unlike `CDLL`. Longer than two leases, so that it
        # must be claimed and renewed meanwhile.
        begun = time.monotonic()
        ctypes.PyDLL(None).sleep(5)
        assert time.monotonic() - begun > 4.9
        run_until(lambda: "d0" in d.scheduled, p, d)
        assert d.workers[0].holds(PROMPT, d.blocks_of("d0"))
        drain(p, d)
        counters = p.figures()["counters"]
        assert (counters["leases_expired"], counters["leases_read_out"]) == (0, 1)
        assert_nothing_held(p, d)


@pytest.mark.parametrize("extra_config", [{}, {"transport": "tcp"}])
def test_no_graphs_and_no_layout_are_asked_of_vllm(extra_config: dict[str, Any]) -> None:
    """Loads end before their request is scheduled, so graphs may be whole; strides are true, so any
    order of memory will do."""
    assert HeteroKVConnector.requires_piecewise_for_cudagraph(extra_config) is False
    assert HeteroKVConnector.get_required_kvcache_layout(None) is None
