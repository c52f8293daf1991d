"""Requests that go wrong, on real engines: left, refused, malformed, or unlike what was prefilled.

One pair of single-rank engines, with a third of another block size. After every test nothing is
held and the free blocks of all engines are those of the start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import HOST, http_get, parse_metrics, sum_metric
from hetero_kv.demo.processes import stopped
from hetero_kv.demo.report import check_held
from hetero_kv.demo.witness import BYTES_READ, CACHE_USAGE, FREE_BLOCKS, LEASES_ALIVE

from . import frames, matrix_report
from .conftest import References
from .fault_site import GRACE_S, LEASE_S, SLACK_S, Site, failures, open_site, risen, spec
from .legs import Pending, completion, decode, post, prefill
from .processes import listening_ports, wait_until, workers

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]

EXPIRED = "hetero_kv_leases_expired_total"
GRANTED = "hetero_kv_leases_granted_total"
READ_OUT = "hetero_kv_leases_read_out_total"
RELEASED = "hetero_kv_leases_released_total"
MISMATCHES = "hetero_kv_digest_mismatches_total"
REJECTED = "hetero_kv_peers_rejected_total"
PREEMPTIONS = "vllm:num_preemptions_total"
RUNNING = "vllm:num_requests_running"

# 24 blocks of 128 tokens with 4 layers and 4 heads: few enough to fill.
PREFILL_CACHE_BYTES = 24 * 128 * 4 * 4 * 64 * 4
DECODE_LEN_MAX = 512
PORTS = range(32_100, 32_200)
SETTLED_S = LEASE_S + GRACE_S + SLACK_S


@pytest.fixture(scope="module")
def site(references: References, engine_logs: Path) -> Iterator[Site]:
    reference = references.of("gqa")
    settings = {"lease_s": LEASE_S, "port_range": f"{PORTS.start}-{PORTS.stop - 1}"}
    specs = [
        spec("prefill", "prefill", reference, settings, kv_cache_bytes=PREFILL_CACHE_BYTES),
        spec("unlike", "prefill", reference, settings, flags=("--block-size", "64")),
        spec(
            "decode",
            "decode",
            reference,
            {},
            model_len_max=DECODE_LEN_MAX,
            env={demo.TRACE_ENV: str(engine_logs / "request-faults.jsonl")},
        ),
    ]
    with open_site(
        specs, reference, engine_logs / "request-faults", ("prefill", "decode")
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_held(site: Site) -> Iterator[None]:
    """Before and after each test, at the latest when every lease has run out."""
    site.require_nothing_held(within_s=SETTLED_S)
    yield
    site.require_nothing_held(within_s=SETTLED_S)


def counts(site: Site, *names: str) -> dict[str, float]:
    """Counters of the prefill engine."""
    return {name: site["prefill"].metric(name) for name in names}


def decode_legs(site: Site) -> float:
    """Decode legs in flight, by the proxy."""
    _, page = http_get(site.port, "/metrics", 5.0)
    samples = parse_metrics(page.decode())
    return sum_metric(samples, "hetero_kv_proxy_in_flight", role="decode")


# === requests that are left ===


def test_left_while_queued_and_during_prefill(site: Site) -> None:
    prompt, _ = site.prompt(200)
    before = counts(site, GRANTED, EXPIRED)
    with stopped(workers(site["prefill"])):
        # The first is in a step that does not end; the second waits in vLLM's queue.
        during = Pending(site.port, completion(prompt, cache_salt="left-during"))
        time.sleep(0.5)
        queued = Pending(site.port, completion(prompt, cache_salt="left-queued"))
        time.sleep(0.5)
        assert not during.done
        assert not queued.done
        during.leave()
        queued.leave()
        time.sleep(0.5)
    site.require_nothing_held(within_s=LEASE_S / 2)
    assert counts(site, GRANTED, EXPIRED) == before, "a request that was left is held for decode"
    site.require_serving("prefill")


def test_left_between_the_legs(site: Site) -> None:
    prompt, _ = site.prompt(200)
    before = counts(site, GRANTED, EXPIRED)
    with stopped([site["decode"].process.pid]):
        pending = Pending(site.port, completion(prompt, cache_salt="left-between"))
        # Held is not enough: prefill's answer may still be on its way to the proxy.
        wait_until(lambda: decode_legs(site) == 1, LEASE_S / 2, "the decode leg is sent")
        assert site["prefill"].metric(LEASES_ALIVE) == 1
        pending.leave()
    site.require_nothing_held(within_s=LEASE_S / 2)
    after = counts(site, GRANTED, EXPIRED)
    assert after[GRANTED] == before[GRANTED] + 1
    assert after[EXPIRED] == before[EXPIRED], "given back by the lease's end only"
    site.require_ready()
    site.require_serving()


def test_left_after_the_load(site: Site) -> None:
    prompt, _ = site.prompt(200)
    before = counts(site, READ_OUT, EXPIRED)
    body = completion(prompt, tokens=250, stream=True, cache_salt="left-after")
    pending = Pending(site.port, body)
    assert pending.first_bytes.wait(60.0)
    assert not pending.done, "the answer had ended before the client left"
    pending.leave()
    wait_until(lambda: site["decode"].metric(RUNNING) == 0, 10.0, "decode has stopped")
    site.require_nothing_held(within_s=LEASE_S / 2)
    after = counts(site, READ_OUT, EXPIRED)
    assert after == {READ_OUT: before[READ_OUT] + 1, EXPIRED: before[EXPIRED]}
    site.require_serving()


# === requests that decode refuses ===


def test_decode_refuses_a_prompt_that_is_too_long_for_it(site: Site) -> None:
    prompt = [17 + index % 400 for index in range(DECODE_LEN_MAX + 100)]
    before = counts(site, GRANTED, RELEASED, EXPIRED)
    reply = post(site.port, completion(prompt, cache_salt="too-long"))
    assert reply.status == 400
    assert str(DECODE_LEN_MAX) in reply.raw, reply.raw[:500]
    site.require_nothing_held(within_s=LEASE_S / 2)
    after = counts(site, GRANTED, RELEASED, EXPIRED)
    assert after[GRANTED] == before[GRANTED] + 1
    assert after[RELEASED] == before[RELEASED] + 1
    assert after[EXPIRED] == before[EXPIRED]
    site.require_serving()


def test_decode_refuses_a_chat_template(site: Site) -> None:
    chat = {
        "model": "model",
        "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}],
        "max_tokens": 4,
        "temperature": 0,
    }
    before = counts(site, GRANTED, EXPIRED)
    params = prefill(site["prefill"], chat, "/v1/chat/completions")
    reply = decode(
        site["decode"],
        {**chat, "chat_template": "{{ no_such_thing.at.all() }}"},
        params,
        "/v1/chat/completions",
    )
    assert 400 <= reply.status < 500, reply.raw[:500]
    site.require_nothing_held(within_s=LEASE_S / 2)
    after = counts(site, GRANTED, EXPIRED)
    assert after == {GRANTED: before[GRANTED] + 1, EXPIRED: before[EXPIRED]}
    site.require_serving()


# === one prefill, several decodes ===


def test_four_choices_read_one_prefill(site: Site) -> None:
    prompt, expected = site.prompt(200)
    before = counts(site, GRANTED, READ_OUT, EXPIRED)
    moved = site["decode"].metric(BYTES_READ)
    # vLLM takes several choices only of a request that samples; the best token is always drawn.
    body = completion(prompt, n=4, cache_salt="four") | {"temperature": 1.0, "top_k": 1}
    reply = post(site.port, body)
    assert reply.status == 200, reply.raw[:500]
    assert reply.tokens == [expected] * 4
    site.require_nothing_held(within_s=LEASE_S / 2)
    after = counts(site, GRANTED, READ_OUT, EXPIRED)
    assert after[GRANTED] == before[GRANTED] + 1
    assert after[READ_OUT] == before[READ_OUT] + 1
    assert after[EXPIRED] == before[EXPIRED]
    assert site["decode"].metric(BYTES_READ) > moved


def test_a_list_of_prompts_with_the_params_of_the_first(site: Site) -> None:
    first, first_tokens = site.prompt(200)
    second, second_tokens = site.prompt(100)
    assert first != second
    mismatches = site["decode"].metric(MISMATCHES)
    moved = site["decode"].metric(BYTES_READ)
    body = completion([first, second], cache_salt="list")
    params = prefill(site["prefill"], body)
    reply = decode(site["decode"], body, params)
    assert reply.status == 200, reply.raw[:500]
    assert reply.tokens == [first_tokens, second_tokens]
    assert site["decode"].metric(MISMATCHES) == mismatches + 1
    assert site["decode"].metric(BYTES_READ) > moved, "the first prompt was not read"


def test_a_list_of_prompts_through_our_proxy(site: Site) -> None:
    first, first_tokens = site.prompt(200)
    second, second_tokens = site.prompt(100)
    before = counts(site, EXPIRED)
    reply = post(site.port, completion([first, second], cache_salt="list-proxy"))
    assert reply.status == 200, reply.raw[:500]
    assert reply.tokens == [first_tokens, second_tokens]
    site.require_nothing_held(within_s=LEASE_S / 2)
    assert counts(site, EXPIRED) == before


# === params that are not what prefill wrote ===

TEXTS = (
    "transfer_id", "remote_engine_id", "remote_incarnation", "remote_host", "remote_request_id",
    "prompt_digest",
)  # fmt: skip
NUMBERS = (
    "hetero_version", "remote_port", "remote_dp_rank", "tp_size", "pp_size", "remote_num_tokens",
    "lease_epoch",
)  # fmt: skip
KEYS = (*TEXTS, *NUMBERS, "remote_block_ids")


def malformed(params: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(what, the field at fault, params) for each key missing, of a wrong type and huge."""
    for key in KEYS:
        yield "missing", key, {name: value for name, value in params.items() if name != key}
        yield "of a wrong type", key, {**params, key: {"a": [True]}}
    for key in TEXTS:
        yield "huge", key, {**params, key: "a" * 100_000}
    for key in NUMBERS:
        # vLLM's own messages hold 64 bits; a lease epoch may have any value of them but these.
        yield "huge", key, {**params, key: -1 if key == "lease_epoch" else 2**62}
    yield "huge", "remote_block_ids", {**params, "remote_block_ids": [[2**40]]}
    yield "huge", "remote_block_ids", {**params, "remote_block_ids": [[1]] * 65}
    yield "of a wrong type", "do_remote_prefill", {**params, "do_remote_prefill": "yes"}
    yield "of a wrong type", "do_remote_decode", {**params, "do_remote_decode": [1]}
    yield "both", "do_remote_decode", {**params, "do_remote_decode": True}


def test_malformed_params_fail_that_request_and_name_the_field(site: Site) -> None:
    prompt, _ = site.prompt(40)
    body = completion(prompt, tokens=2, cache_salt="malformed")
    params = prefill(site["prefill"], body)
    assert set(KEYS) <= params.keys()
    wrong = []
    for number, (what, field, changed) in enumerate(malformed(params)):
        before = failures(site["decode"])
        # Another salt each: a hit in the local cache would leave nothing to fail.
        reply = decode(site["decode"], {**body, "cache_salt": f"bad-{number}"}, changed)
        new = risen(site["decode"], before)
        if reply.status != 500 or new != {("bad_params", field): 1}:
            wrong.append(f"{field} {what}: {reply.status}, counted {new}")
        assert field in site.log("decode"), f"the log does not name {field}"
    assert not wrong, "\n".join(wrong)
    # Beyond 64 bits vLLM itself refuses the request.
    refused = decode(site["decode"], body, {**params, "lease_epoch": 10**25})
    assert refused.status == 400, refused.raw[:300]
    site.require_serving()


def foreign(
    params: dict[str, Any], http_port: int
) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """(field, params, reasons one of which is counted) for values that are well formed."""
    yield "transfer_id", {**params, "transfer_id": "ab" * 16}, {"lease_gone"}
    yield "remote_engine_id", {**params, "remote_engine_id": "another"}, {"pair_refused"}
    yield "remote_incarnation", {**params, "remote_incarnation": "0" * 16}, {"pair_refused"}
    yield "remote_host", {**params, "remote_host": "no-such-host.invalid"}, {"unreachable"}
    yield "remote_port", {**params, "remote_port": 1}, {"unreachable"}
    yield "remote_port", {**params, "remote_port": http_port}, {"peer_lost", "pair_refused"}
    yield "lease_epoch", {**params, "lease_epoch": params["lease_epoch"] + 7}, {"lease_gone"}


def test_foreign_params_fail_that_request_and_the_reason_is_counted(site: Site) -> None:
    prompt, expected = site.prompt(40)
    wrong = []
    cases = list(foreign(prefill(site["prefill"], completion(prompt)), site["prefill"].port))
    for number, (field, _, _) in enumerate(cases):
        # Its own prefill each: a transfer id belongs to the params it first came with.
        body = completion(prompt, cache_salt=f"foreign-{number}")
        params = prefill(site["prefill"], body)
        _, changed, reasons = list(foreign(params, site["prefill"].port))[number]
        before = failures(site["decode"])
        begun = time.monotonic()
        reply = decode(site["decode"], body, changed)
        took_s = time.monotonic() - begun
        new = risen(site["decode"], before)
        counted = {reason for reason, _ in new}
        if reply.status != 500 or not counted or not counted <= reasons | {"bad_params"}:
            wrong.append(f"{field}: {reply.status} after {took_s:.1f} s, counted {new}")
        site.require_nothing_held(within_s=SETTLED_S)
    assert not wrong, "\n".join(wrong)
    site.require_serving()
    body = completion(prompt, cache_salt="foreign-end")
    reply = decode(site["decode"], body, prefill(site["prefill"], body))
    assert reply.tokens == [expected], "the true peer is still paired with"


def test_params_of_another_prompt_are_not_read(site: Site) -> None:
    first, _ = site.prompt(200)
    second, second_tokens = site.prompt(100)
    mismatches = site["decode"].metric(MISMATCHES)
    moved = site["decode"].metric(BYTES_READ)
    before = counts(site, RELEASED, EXPIRED)
    params = prefill(site["prefill"], completion(first, cache_salt="other-prompt"))
    reply = decode(site["decode"], completion(second, cache_salt="other-prompt"), params)
    assert reply.status == 200
    assert reply.tokens == [second_tokens]
    assert site["decode"].metric(MISMATCHES) == mismatches + 1
    assert site["decode"].metric(BYTES_READ) == moved
    site.require_nothing_held(within_s=LEASE_S / 2)
    after = counts(site, RELEASED, EXPIRED)
    assert after == {RELEASED: before[RELEASED] + 1, EXPIRED: before[EXPIRED]}


def test_an_incompatible_pair_is_refused_by_field_with_both_values(site: Site) -> None:
    prompt, _ = site.prompt(40)
    body = completion(prompt, cache_salt="unlike")
    params = prefill(site["unlike"], body)
    before = failures(site["decode"])
    begun = len(site.log("decode"))
    reply = decode(site["decode"], body, params)
    assert reply.status == 500
    assert "Internal" in reply.raw or "error" in reply.raw
    new = risen(site["decode"], before)
    assert new == {("pair_refused", "page_format"): 1}
    lines = [line for line in site.log("decode")[begun:].splitlines() if "page_format" in line]
    assert lines, "the log does not name the field"
    sizes = ("whole pages of 64 tokens", "whole pages of 128 tokens")
    assert any("CPU_ATTN" in line and all(s in line for s in sizes) for line in lines), lines
    site.require_serving()


# === ports ===


def test_garbage_on_every_port_closes_that_connection_only(site: Site) -> None:
    ports = listening_ports(site["prefill"], PORTS)
    assert len(ports) >= 2, f"control and data listeners among {ports}"
    prompt, expected = site.prompt(100)
    closed = 0
    for number, (name, sent, ends) in enumerate(frames.hostile(seed=11)):
        pending = Pending(site.port, completion(prompt, cache_salt=f"garbage-{number}"))
        for port in ports:
            ended = frames.send(HOST, port, sent, wait_s=10.0 if ends else 0.2)
            assert ended or not ends, f"port {port} left the connection open after {name}"
            closed += ended
        reply = pending.reply()
        assert reply.status == 200, f"during {name}: {reply.raw[:300]}"
        assert reply.tokens == [expected], f"during {name}"
    assert closed >= 2 * len(ports)
    assert listening_ports(site["prefill"], PORTS) == ports
    site.require_serving("prefill")


# === leases and blocks ===


def test_a_leaked_lease_is_seen_by_both_measures_and_ends_with_its_time(site: Site) -> None:
    prompt, _ = site.prompt(200)
    before = counts(site, EXPIRED)
    prefill(site["prefill"], completion(prompt, cache_salt="leaked"))
    wait_until(lambda: site.blocks["prefill"].read().leases == 1, 2.0, "the gauge shows the lease")
    held = site.blocks["prefill"].read()
    assert not check_held(held).ok
    assert held.leases == 1
    assert held.blocks > 0
    begun = time.monotonic()
    site.require_nothing_held("prefill", within_s=SETTLED_S)
    assert time.monotonic() - begun > LEASE_S / 2, "given back long before its time"
    assert counts(site, EXPIRED)[EXPIRED] == before[EXPIRED] + 1


def test_an_idle_engine_frees_within_a_fifth_of_a_second(site: Site) -> None:
    prompt, _ = site.prompt(200)
    linger_s = 0.1
    taken_s = []
    for number in range(12):
        reply = post(site.port, completion(prompt, tokens=1, cache_salt=f"idle-{number}"))
        answered = time.monotonic()
        assert reply.status == 200
        wait_until(
            lambda: site["prefill"].metric(LEASES_ALIVE) == 0, 5.0, "the lease is over", 0.005
        )
        # Decode acknowledges when no sibling has come for `sibling_linger_ms` after the load.
        taken_s.append(time.monotonic() - answered - linger_s)
        assert site["prefill"].metric(CACHE_USAGE) == 0
    matrix_report.measure(
        "freed on an idle engine after the acknowledgement",
        median_s=round(statistics.median(taken_s), 4),
        largest_s=round(max(taken_s), 4),
        times=len(taken_s),
    )
    assert statistics.median(taken_s) <= 0.2, taken_s


def test_a_full_producer_cache_still_preempts_and_moves_on(site: Site) -> None:
    engine = site["prefill"]
    held_prompt, held_tokens = site.prompt(200)
    running = [site.prompt(100)[0], [*reversed(site.prompt(100)[0])]]
    running = [prompt[:120] for prompt in running]
    bodies = [
        completion(prompt, tokens=60, cache_salt=f"preempt-{number}")
        for number, prompt in enumerate(running)
    ]
    # What they are to be answered with, from the same engine with room for both.
    alone = [post(engine.port, body) for body in bodies]
    assert [reply.status for reply in alone] == [200, 200]
    free = engine.metric(FREE_BLOCKS)
    block = site.reference.block_tokens
    each = -(-len(held_prompt) // block)
    first = -(-len(running[0]) // block)
    # Room for both to start, and for one of them to go over the edge of a block.
    leases = int((free - 2 * first - 1) // each)
    preemptions = engine.metric(PREEMPTIONS)
    salted = [completion(held_prompt, cache_salt=f"full-{number}") for number in range(leases)]
    params = [prefill(engine, body) for body in salted]
    left = int(free - leases * each)
    fillers = left - 2 * first - 1
    assert fillers in (0, 1)
    if fillers:
        prefill(engine, completion(running[0][:50], cache_salt="full-filler"))
    together = [Pending(engine.port, body) for body in bodies]
    replies = [pending.reply(LEASE_S) for pending in together]
    alive = engine.metric(LEASES_ALIVE)
    assert [reply.status for reply in replies] == [200, 200]
    assert [reply.tokens for reply in replies] == [reply.tokens for reply in alone]
    assert engine.metric(PREEMPTIONS) > preemptions
    assert alive == leases + fillers, "leases ended while the others were to be preempted"
    matrix_report.measure(
        "a full producer cache",
        leases_alive=int(alive),
        blocks_free=left - fillers,
        preemptions=int(engine.metric(PREEMPTIONS) - preemptions),
    )
    # The others are never read: they end with their time.
    last = decode(site["decode"], salted[-1], params[-1])
    assert last.tokens == [held_tokens]
