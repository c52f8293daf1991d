"""What vLLM does to requests besides decoding them, on real engines: prefix hits on either side,
chunked prefill, preemption, many at once, another dtype.

What is expected is what the prefill engine answers by itself, asked without `kv_transfer_params`
and under a cache salt of its own, so that nothing of the transfer is in it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hetero_kv.demo import run as demo
from hetero_kv.demo.prompts import FIRST_ORDINARY_TOKEN
from hetero_kv.demo.witness import Counters, settle

from . import matrix_report
from .conftest import References
from .fault_site import LEASE_S, Site, open_site, spec
from .legs import Pending, completion, decode, post, prefill

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]

PREEMPTIONS = "vllm:num_preemptions_total"
HIT_TOKENS = "vllm:prefix_cache_hits_total"
# Smaller than a block, so that a chunk ends inside of one.
CHUNK_TOKENS = 32
# 24 blocks of 128 tokens with 4 layers and 4 heads: few enough to fill.
DECODE_CACHE_BYTES = 24 * 128 * 4 * 4 * 64 * 4
SALTS = itertools.count()


@pytest.fixture(scope="module")
def site(references: References, engine_logs: Path) -> Iterator[Site]:
    reference = references.of("gqa")
    chunked = ("--enable-chunked-prefill", "--max-num-batched-tokens", str(CHUNK_TOKENS))
    specs = [
        spec(
            "prefill",
            "prefill",
            reference,
            {"lease_s": 60, "claim_timeout_s": 60},
            flags=("--enable-prefix-caching", *chunked),
        ),
        spec(
            "decode",
            "decode",
            reference,
            {"lease_s": 60, "claim_timeout_s": 60},
            flags=("--enable-prefix-caching",),
            kv_cache_bytes=DECODE_CACHE_BYTES,
            env={demo.TRACE_ENV: str(engine_logs / "request-life.jsonl")},
        ),
    ]
    with open_site(specs, reference, engine_logs / "request-life", ("prefill", "decode")) as site:
        yield site


@pytest.fixture(autouse=True)
def nothing_is_held(site: Site) -> Iterator[None]:
    yield
    site.require_nothing_held(within_s=LEASE_S)


def tokens(count: int, seed: int, vocab_size: int = 256) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(count)]


def salt() -> str:
    """Of nobody else's blocks."""
    return f"life-{next(SALTS)}"


def alone(site: Site, prompt: Sequence[int], count: int = 16, engine: str = "prefill") -> object:
    """What one engine answers that computes everything itself."""
    reply = post(site[engine].port, completion(prompt, count, cache_salt=salt()))
    assert reply.status == 200, reply.raw[:500]
    return reply.tokens


class Watch:
    """The decode side's counters since it was made."""

    def __init__(self, site: Site, engine: str = "decode") -> None:
        self._engines = [site[engine]]
        self._before = Counters.read(self._engines)

    def wait(self, computed: int) -> Counters:
        """Once so many prompt tokens were computed."""
        return settle(
            lambda: Counters.read(self._engines) - self._before,
            lambda now: now.computed_tokens >= computed,
        )


def moved(site: Site, prompt: Sequence[int], cache_salt: str, count: int = 16) -> object:
    """Prefilled here, decoded there."""
    body = completion(prompt, count, cache_salt=cache_salt)
    reply = decode(site["decode"], body, prefill(site["prefill"], body))
    assert reply.status == 200, reply.raw[:500]
    return reply.tokens


def test_a_prefix_hit_on_decode_reads_the_missing_tail_only(site: Site) -> None:
    block = site.reference.block_tokens
    shared = tokens(2 * block, 1)
    first, second = [*shared, *tokens(block + 5, 2)], [*shared, *tokens(block + 9, 3)]
    same = salt()
    watch = Watch(site)
    assert moved(site, first, same) == alone(site, first)
    one = watch.wait(1)
    assert one.external_tokens == len(first) - 1
    watch = Watch(site)
    assert moved(site, second, same) == alone(site, second)
    two = watch.wait(1)
    # The shared blocks are here; of the rest, the last token is computed.
    assert (two.cached_tokens, two.external_tokens, two.computed_tokens) == (
        2 * block,
        len(second) - 1 - 2 * block,
        1,
    )
    blocks = -(-len(first) // block)
    assert two.bytes_read * blocks == one.bytes_read * (blocks - 2)


def test_a_full_hit_on_decode_reads_nothing(site: Site) -> None:
    block = site.reference.block_tokens
    prompt = tokens(2 * block + 1, 4)
    same = salt()
    expected = alone(site, prompt)
    assert moved(site, prompt, same) == expected
    watch = Watch(site)
    assert moved(site, prompt, same) == expected
    again = watch.wait(1)
    assert (again.bytes_read, again.external_tokens) == (0, 0)
    assert (again.cached_tokens, again.computed_tokens) == (2 * block, 1)


def test_a_prefix_hit_on_prefill_hands_over_the_whole_prompt(site: Site) -> None:
    block = site.reference.block_tokens
    prompt = tokens(2 * block + 40, 5)
    same = salt()
    hits = site["prefill"].metric(HIT_TOKENS)
    # Cached there by a request that nothing is handed over of.
    reply = post(site["prefill"].port, completion(prompt, 1, cache_salt=same))
    assert reply.status == 200
    watch = Watch(site)
    assert moved(site, prompt, same) == alone(site, prompt)
    assert site["prefill"].metric(HIT_TOKENS) - hits == 2 * block
    counters = watch.wait(1)
    assert counters.external_tokens == len(prompt) - 1
    assert counters.bytes_read > 0


@pytest.mark.parametrize("length", [100, 4 * CHUNK_TOKENS, 300])
def test_a_prompt_prefilled_in_chunks(site: Site, length: int) -> None:
    prompt = tokens(length, 6 + length)
    watch = Watch(site)
    assert moved(site, prompt, salt()) == alone(site, prompt, engine="decode")
    counters = watch.wait(1)
    assert counters.external_tokens == length - 1


def test_requests_preempted_on_decode_go_on_rightly(site: Site) -> None:
    """More is decoded at once than the cache holds: vLLM throws some out and computes them anew."""
    length, count, several = 250, 200, 8
    prompts = [tokens(length, 20 + index) for index in range(several)]
    expected = [alone(site, prompt, count) for prompt in prompts]
    bodies = [completion(prompt, count, cache_salt=salt()) for prompt in prompts]
    params = [prefill(site["prefill"], body) for body in bodies]
    preempted = site["decode"].metric(PREEMPTIONS)
    pending = [
        Pending(site["decode"].port, {**body, "kv_transfer_params": handed})
        for body, handed in zip(bodies, params, strict=True)
    ]
    replies = [request.reply() for request in pending]
    assert [reply.status for reply in replies] == [200] * several
    assert [reply.tokens for reply in replies] == expected
    assert site["decode"].metric(PREEMPTIONS) > preempted, "nothing was preempted"


def test_sixty_four_at_once(site: Site) -> None:
    prompts = [tokens(30 + index, 40 + index) for index in range(64)]
    expected = [alone(site, prompt, 4) for prompt in prompts]
    watch = Watch(site)
    pending = [Pending(site.port, completion(prompt, 4, cache_salt=salt())) for prompt in prompts]
    replies = [request.reply() for request in pending]
    assert [reply.status for reply in replies] == [200] * 64
    assert [reply.tokens for reply in replies] == expected
    counters = watch.wait(64)
    # Preempted ones compute their prompt anew; what was moved was moved once.
    assert counters.external_tokens == sum(len(prompt) - 1 for prompt in prompts)
    matrix_report.measure("64 at once", bytes_read=int(counters.bytes_read))


def test_bfloat16(references: References, engine_logs: Path) -> None:
    """One request at a time: with other batches the kernels of bfloat16 round otherwise."""
    reference = references.of("gqa")
    specs = [
        spec(role, role, reference, {}, flags=("--dtype", "bfloat16"))
        for role in ("prefill", "decode")
    ]
    logs = engine_logs / "bfloat16"
    with open_site(specs, reference, logs, ("prefill", "decode")) as site:
        for length in (2, 127, 128, 129, 300):
            prompt = tokens(length, 200 + length)
            watch = Watch(site)
            assert moved(site, prompt, salt()) == alone(site, prompt, engine="decode"), length
            counters = watch.wait(1)
            assert counters.external_tokens == length - 1
        site.require_nothing_held()
