"""What becomes of a decode request: prefix hits, failures, siblings, rejections, preemption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from contract_engine import (
    BLOCK_SIZE,
    PROMPT,
    Engine,
    assert_nothing_held,
    drain,
    engines,
    prefill,
    run_until,
)
from hetero_kv.stats import key

pytestmark = pytest.mark.vllm

OTHER = list(range(205, 305))


def pair(folder: Path, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None) -> Any:
    """One prefill and one decode engine."""
    return engines((folder, "kv_producer", p or {}), (folder, "kv_consumer", d or {}))


def failures(engine: Engine) -> dict[tuple[str, str], float]:
    """Failed loads by reason and field, as the engine's ``/metrics`` would say."""
    total: dict[tuple[str, str], float] = {}
    for stats in engine.stats:
        for series, amount in stats["counters"].items():
            for reason, field in [
                (r, f)
                for r in ("bad_params", "digest_mismatch", "lease_gone", "unreachable", "fenced")
                for f in ("", "*", "transfer_id", "lease_epoch", "prompt_digest")
                if series == key("hetero_kv_load_failures", r, f)
            ]:
                total[reason, field] = total.get((reason, field), 0) + amount
    return total


def bytes_read(engine: Engine) -> int:
    """KV bytes read by all ranks, as counted in the transport."""
    return sum(
        int(amount)
        for stats in engine.stats
        for series, amount in stats["counters"].items()
        if series.startswith('["hetero_kv_bytes_read"')
    )


def block_bytes() -> int:
    """One block of one layer over all heads, times the layers."""
    from contract_engine import HEAD_SIZE, KV_HEADS, LAYERS

    return len(LAYERS) * KV_HEADS * BLOCK_SIZE * 2 * HEAD_SIZE * 4


@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_decode_holds_exactly_what_prefill_computed(
    config_folder: Path, tp_p: int, tp_d: int
) -> None:
    with pair(config_folder, {"tp": tp_p}, {"tp": tp_d, "log_stats": True}) as (p, d):
        d.add("d0", PROMPT, prefill(p), max_tokens=2)
        run_until(lambda: "d0" in d.scheduled, p, d)
        blocks = d.blocks_of("d0")
        assert all(worker.holds(PROMPT, blocks) for worker in d.workers)
        drain(p, d)
        assert bytes_read(d) == 7 * block_bytes()
        assert_nothing_held(p, d)


@pytest.mark.parametrize(
    ("p_shape", "d_shape"),
    [({"pp": 2}, {}), ({}, {"pp": 2}), ({"pp": 2}, {"pp": 2}), ({"tp": 2, "pp": 2}, {"tp": 1})],
)
def test_decode_holds_what_prefill_computed_over_stages(
    config_folder: Path, p_shape: dict[str, int], d_shape: dict[str, int]
) -> None:
    """vLLM counts one report of each worker, tp times pp of them, before it frees or schedules."""
    with pair(config_folder, p_shape, {**d_shape, "log_stats": True}) as (p, d):
        d.add("d0", PROMPT, prefill(p), max_tokens=2)
        run_until(lambda: "d0" in d.scheduled, p, d)
        blocks = d.blocks_of("d0")
        assert [len(w.layers) for w in d.workers] == [2 // d_shape.get("pp", 1)] * len(d.workers)
        assert all(worker.holds(PROMPT, blocks) for worker in d.workers)
        drain(p, d)
        assert bytes_read(d) == 7 * block_bytes()
        assert_nothing_held(p, d)


def test_a_prefix_hit_on_decode_reads_only_the_tail(config_folder: Path) -> None:
    with pair(config_folder, d={"log_stats": True}) as (p, d):
        d.add("warm", PROMPT[:40])
        run_until(lambda: "warm" in d.outcomes, d)
        d.add("d0", PROMPT, prefill(p), max_tokens=2)
        run_until(lambda: "d0" in d.scheduled, p, d)
        # 40 tokens are two full blocks of 16: 99 - 32 come from outside, in blocks 2 to 6.
        assert d.calls("get_num_new_matched_tokens", "d0") == [(67, True)]
        assert d.workers[0].holds(PROMPT, d.blocks_of("d0"))
        drain(p, d)
        assert bytes_read(d) == 5 * block_bytes()
        assert_nothing_held(p, d)


def test_a_full_local_hit_reads_nothing_and_releases(config_folder: Path) -> None:
    with pair(config_folder, {"settings": {"lease_s": 3600}}, {"log_stats": True}) as (p, d):
        prompt = PROMPT[:97]
        d.add("warm", prompt)
        run_until(lambda: "warm" in d.outcomes, d)
        d.add("d0", prompt, prefill(p, "p0", prompt))
        # 96 of 97 tokens are cached in full blocks, and the last one is always computed here.
        run_until(lambda: "d0" in d.outcomes, p, d)
        assert d.calls("get_num_new_matched_tokens", "d0") == [(0, False)]
        assert d.calls("update_state_after_alloc", "d0") == [0]
        drain(p, d)
        assert bytes_read(d) == 0
        assert p.figures()["counters"]["leases_expired"] == 0
        assert_nothing_held(p, d)


def test_a_one_token_prompt_moves_nothing(config_folder: Path) -> None:
    with pair(config_folder, {"settings": {"lease_s": 3600}}, {"log_stats": True}) as (p, d):
        d.add("d0", [9], prefill(p, "p0", [9]), max_tokens=2)
        drain(p, d)
        assert d.outcomes["d0"] == "length"
        assert bytes_read(d) == 0
        assert_nothing_held(p, d)


@pytest.mark.parametrize("tp", [1, 2])
def test_policy_fail_ends_the_request_with_an_error(config_folder: Path, tp: int) -> None:
    with pair(config_folder, d={"tp": tp, "log_stats": True}) as (p, d):
        params = prefill(p)
        drain_by = dict(params, lease_epoch=params["lease_epoch"] + 1)
        d.add("d0", PROMPT, drain_by)
        run_until(lambda: "d0" in d.outcomes, p, d)
        assert d.outcomes["d0"] == "error"
        assert "d0" not in d.scheduled
        p.connector.reset_cache()
        drain(p, d)
        assert sum(failures(d).values()) == 1
        assert failures(d)["lease_gone", ""] == 1
        assert_nothing_held(p, d)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cached", [0, 40])
def test_policy_recompute_truncates_and_asks_again(
    config_folder: Path, tp: int, cached: int
) -> None:
    options = {"tp": tp, "policy": "recompute", "log_stats": True}
    with pair(config_folder, d=options) as (p, d):
        if cached:
            d.add("warm", PROMPT[:cached])
            run_until(lambda: "warm" in d.outcomes, d)
        local = cached // BLOCK_SIZE * BLOCK_SIZE
        params = prefill(p)
        d.add("d0", PROMPT, dict(params, lease_epoch=params["lease_epoch"] + 1), max_tokens=2)
        run_until(lambda: "d0" in d.scheduled, p, d)
        # All that was to come from outside is computed here, from the first bad block on.
        assert d.scheduled["d0"][0] == len(PROMPT) - local
        matched = d.calls("get_num_new_matched_tokens", "d0")
        if local:
            # Blocks of the local hit are kept, and vLLM does not ask again.
            assert matched == [(99 - local, True)]
        else:
            # Nothing was valid: vLLM frees everything and asks again; a second load is not offered.
            assert matched == [(99, True), (0, False)]
        assert all(worker.holds(PROMPT, d.blocks_of("d0")) for worker in d.workers)
        run_until(lambda: "d0" in d.outcomes, p, d)
        assert d.outcomes["d0"] == "length"
        p.connector.reset_cache()
        drain(p, d)
        assert_nothing_held(p, d)


def test_a_preempted_request_does_not_load_again(config_folder: Path) -> None:
    with pair(config_folder, d={"log_stats": True, "num_blocks": 32}) as (p, d):
        d.add("d0", PROMPT, prefill(p), max_tokens=4)
        run_until(lambda: "d0" in d.scheduled, p, d)
        request = d.scheduler.requests["d0"]
        # As `reset_prefix_cache` does with running requests.
        assert d.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert request.status == RequestStatus.PREEMPTED
        run_until(lambda: "d0" in d.outcomes, p, d)
        assert d.outcomes["d0"] == "length"
        assert d.calls("get_num_new_matched_tokens", "d0") == [(99, True), (0, False)]
        assert d.figures()["counters"]["loads_ordered"] == 1
        drain(p, d)
        assert bytes_read(d) == 7 * block_bytes()
        assert_nothing_held(p, d)


@pytest.mark.parametrize(("said", "computed"), [(10, 90), (1000, 1)])
def test_a_changed_number_of_tokens_in_the_params_does_no_harm(
    config_folder: Path, said: int, computed: int
) -> None:
    with pair(config_folder, {"settings": {"lease_s": 3600}}) as (p, d):
        d.add("d0", PROMPT, {**prefill(p), "remote_num_tokens": said}, max_tokens=50)
        run_until(lambda: "d0" in d.scheduled, p, d)
        assert d.scheduled["d0"] == [computed]
        assert d.workers[0].holds(PROMPT, d.blocks_of("d0"))
        drain(p, d)
        assert d.outcomes["d0"] == "length"
        assert_nothing_held(p, d)


def test_four_siblings_read_one_lease(config_folder: Path) -> None:
    with pair(config_folder, {"settings": {"lease_s": 3600}}, {"log_stats": True}) as (p, d):
        params = prefill(p)
        # `n=4`: vLLM gives all children one SamplingParams copy, hence one `kv_transfer_params`.
        names = [f"{index}_d0" for index in range(4)]
        for name in names:
            d.add(name, PROMPT, params, max_tokens=2)
        run_until(lambda: set(names) <= d.scheduled.keys(), p, d)
        assert all(d.outcomes.get(name) in (None, "length") for name in names)
        drain(p, d)
        assert {d.outcomes[name] for name in names} == {"length"}
        assert p.figures()["counters"]["leases_granted"] == 1
        assert p.figures()["counters"]["leases_read_out"] == 1
        assert not failures(d)
        assert_nothing_held(p, d)


def test_a_list_of_prompts_with_the_first_ones_params(config_folder: Path) -> None:
    with pair(config_folder, {"settings": {"lease_s": 3600}}, {"log_stats": True}) as (p, d):
        first, second = prefill(p, "p0", PROMPT), prefill(p, "p1", OTHER)
        assert first["prompt_digest"] != second["prompt_digest"]
        # The API answers with the first prompt's params only; a router copies them to both.
        d.add("cmpl-0", OTHER, first, max_tokens=100)
        d.add("cmpl-1", PROMPT, first, max_tokens=2)
        run_until(lambda: {"cmpl-0", "cmpl-1"} <= d.scheduled.keys(), p, d)
        # Each computes what is its own: the second prompt here, the first from outside.
        assert d.scheduled["cmpl-0"][0] == 100
        assert d.scheduled["cmpl-1"][0] == 1
        assert d.workers[0].holds(OTHER, d.blocks_of("cmpl-0"))
        assert d.workers[0].holds(PROMPT, d.blocks_of("cmpl-1"))
        d.abort("cmpl-0")
        run_until(lambda: "cmpl-1" in d.outcomes, p, d)
        assert d.figures()["counters"]["digest_mismatches"] == 1
        # Nobody can read the second prompt's KV; its lease ends by time.
        p.connector.reset_cache()
        drain(p, d)
        assert_nothing_held(p, d)


def test_a_prompt_unlike_its_digest_fails_where_kv_is_required(config_folder: Path) -> None:
    options = {"settings": {"require_kv": True}, "log_stats": True}
    with pair(config_folder, {"settings": {"lease_s": 3600}}, options) as (p, d):
        d.add("d0", OTHER, prefill(p))
        drain(p, d)
        assert d.outcomes["d0"] == "error"
        assert failures(d) == {("digest_mismatch", "prompt_digest"): 1}
        assert_nothing_held(p, d)


@pytest.mark.parametrize("require_kv", [False, True])
def test_the_extra_request_of_a_rejected_one_releases_prefills_blocks(
    config_folder: Path, require_kv: bool
) -> None:
    options = {"settings": {"require_kv": require_kv}, "log_stats": True}
    with pair(config_folder, {"settings": {"lease_s": 3600}}, options) as (p, d):
        params = prefill(p)
        assert p.free_blocks() == p.free_at_start - 7
        # `AsyncLLM.notify_kv_transfer_request_rejected`: another id and prompt, aborted at once.
        d.add("d0", [0], params, abort_immediately=True)
        assert d.calls("request_finished_all_groups", "d0") == [(False, None)]
        drain(p, d)
        assert p.figures()["counters"]["leases_expired"] == 0
        assert d.figures()["counters"]["digest_mismatches"] == 0
        assert not failures(d)
        assert_nothing_held(p, d)


def test_a_rejection_does_not_take_the_lease_from_a_sibling(config_folder: Path) -> None:
    with pair(config_folder, {"settings": {"lease_s": 3600}}, {"log_stats": True}) as (p, d):
        params = prefill(p)
        d.add("d0", PROMPT, params, max_tokens=2)
        d.add("d1", [0], params, abort_immediately=True)
        run_until(lambda: "d0" in d.scheduled, p, d)
        assert d.scheduled["d0"] == [1]
        assert d.workers[0].holds(PROMPT, d.blocks_of("d0"))
        drain(p, d)
        assert not failures(d)
        assert_nothing_held(p, d)


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_an_abort_gives_everything_back(config_folder: Path, when: str) -> None:
    # With one slot taken a second request waits in the queue without blocks.
    options = {"max_num_seqs": 1} if when == "waiting" else {}
    with pair(config_folder, {"settings": {"lease_s": 3600}}, options) as (p, d):
        params = prefill(p)
        if when == "waiting":
            d.add("busy", OTHER, max_tokens=50)
            d.step()
        d.add("d0", PROMPT, params)
        d.step()
        d.abort("d0")
        if when == "waiting":
            d.abort("busy")
        drain(p, d)
        assert p.figures()["counters"]["leases_expired"] == 0
        assert_nothing_held(p, d)


def test_prefill_aborted_before_its_end_holds_nothing(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {})) as (p,):
        p.add("p0", PROMPT, {"do_remote_decode": True}, max_tokens=4)
        p.step()
        p.abort("p0")
        assert p.calls("request_finished_all_groups", "p0") == [(False, None)]
        assert p.free_blocks() == p.free_at_start
        drain(p)
        assert_nothing_held(p)


def test_an_unclaimed_lease_frees_by_time(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {"settings": {"lease_s": 0.5}})) as (p,):
        prefill(p)
        drain(p)
        assert p.figures()["counters"]["leases_expired"] == 1
        assert_nothing_held(p)


def test_a_reset_of_the_connectors_cache_ends_leases(config_folder: Path) -> None:
    with engines((config_folder, "kv_producer", {"settings": {"lease_s": 3600}})) as (p,):
        prefill(p)
        # vLLM refuses while a prompt is held, and the same call asks the connector to let go.
        assert p.scheduler.reset_prefix_cache(reset_connector=True) is False
        drain(p)
        assert p.scheduler.reset_prefix_cache(reset_connector=True) is True
        assert_nothing_held(p)


def test_a_request_of_another_role_is_computed_here(config_folder: Path) -> None:
    with pair(config_folder, d={"log_stats": True}) as (p, d):
        params = prefill(p)
        p.add("wrong-way", PROMPT, params)
        run_until(lambda: "wrong-way" in p.outcomes, p)
        assert p.outcomes["wrong-way"] == "length"
        d.add("wrong-too", OTHER, {"do_remote_decode": True})
        run_until(lambda: "wrong-too" in d.outcomes, d)
        assert d.answers["wrong-too"] is None
        p.connector.reset_cache()
        drain(p, d)
        assert_nothing_held(p, d)


def test_both_flags_at_once_fail_the_request_and_leave_nothing(config_folder: Path) -> None:
    with engines((config_folder, "kv_both", {"log_stats": True})) as (engine,):
        engine.add("r0", PROMPT, {"do_remote_prefill": True, "do_remote_decode": True})
        drain(engine)
        assert engine.outcomes["r0"] == "error"
        assert_nothing_held(engine)


@pytest.mark.parametrize("params", ["text", ["list"], 7])
def test_params_that_are_no_object_do_not_end_the_engine(config_folder: Path, params: Any) -> None:
    with engines((config_folder, "kv_consumer", {"log_stats": True})) as (d,):
        # `vllm_xargs` is merged into `extra_args` unchecked, and vLLM calls `.get` on it.
        with pytest.raises(AttributeError):
            params.get("do_remote_prefill")
        d.add("d0", PROMPT, params)
        drain(d)
        assert d.outcomes["d0"] == "length"
        assert failures(d) == {("bad_params", "*"): 1}
        assert_nothing_held(d)


def test_a_prefill_engine_that_is_gone_fails_the_load(config_folder: Path) -> None:
    with engines((config_folder, "kv_consumer", {"settings": {"claim_timeout_s": 5}})) as (d,):
        with engines((config_folder, "kv_producer", {})) as (p,):
            params = prefill(p)
        d.add("d0", PROMPT, params)
        drain(d)
        assert d.outcomes["d0"] == "error"
        ((reason, _, count),) = d.figures()["failures"]
        assert (reason, count) in {("unreachable", 1), ("claim_timeout", 1), ("peer_lost", 1)}
        assert_nothing_held(d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_read_is_given_back_and_not_acknowledged(config_folder: Path, policy: str) -> None:
    with pair(config_folder, {"settings": {"lease_s": 3600}}, {"policy": policy}) as (p, d):
        params = prefill(p)
        # The rank's data plane is gone, its control plane and its part in releases are not.
        p.workers[0].connector._worker._core.shutdown(5.0)
        d.add("d0", PROMPT, params, max_tokens=2)
        drain(p, d)
        assert d.outcomes["d0"] == ("error" if policy == "fail" else "length")
        counters = p.figures()["counters"]
        assert (counters["leases_read_out"], counters["leases_released"]) == (0, 1)
        assert_nothing_held(p, d)
