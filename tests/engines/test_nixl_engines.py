"""Engines that run vLLM's own `NixlConnector`, behind our proxy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_kv.demo import run as demo
from hetero_kv.demo.engines import HOST, Engine, EngineSpec, Role, free_port, running

from .conftest import References
from .legs import Pending, completion, post
from .reference import Reference

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from peer_wheels import NIXL_FOR_VLLM, WheelError, unpacked

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]

EXTERNAL = "vllm:external_prefix_cache_hits_total"
NIXL_BYTES = "vllm:nixl_bytes_transferred_sum"


def nixl_spec(role: Role, reference: Reference, folder: Path) -> EngineSpec:
    """NIXL on a host without CUDA: host memory, by UCX over loopback."""
    kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
    return EngineSpec(
        name=f"nixl-{role}",
        model=reference.model,
        role=role,
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_buffer_device": "cpu",
        },
        env={
            "PYTHONPATH": str(folder),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": "lo",
        },
    )


class Pair:
    def __init__(self, engines: list[Engine], reference: Reference, port: int) -> None:
        self.prefill, self.decode = engines
        self.reference = reference
        self.port = port


@pytest.fixture(scope="module")
def pair(references: References, engine_logs: Path) -> Iterator[Pair]:
    try:
        folder = unpacked(*NIXL_FOR_VLLM)
    except WheelError as error:
        pytest.skip(str(error))
    reference = references.of("gqa")
    roles: tuple[Role, Role] = ("prefill", "decode")
    specs = [nixl_spec(role, reference, folder) for role in roles]
    logs = engine_logs / "nixl"
    with running(specs, logs) as engines:
        demo.warm_up(engines)
        sides = ([engines[0]], [engines[1]])
        with demo.proxy(*sides, "nixl-proxy", logs, connector="nixl") as port:
            yield Pair(engines, reference, port)


def test_answers_are_those_of_one_engine_and_nixl_moved_their_kv(pair: Pair) -> None:
    prompts = [list(prompt.token_ids) for prompt in pair.reference.prompts]
    chosen = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))[-4:]
    before = pair.decode.metric(EXTERNAL)
    for at in chosen:
        reply = post(pair.port, completion(prompts[at], len(pair.reference.expected[at])))
        assert reply.status == 200, reply.raw[:500]
        assert reply.tokens == [pair.reference.expected[at]], f"prompt {at}"
    assert pair.decode.metric(EXTERNAL) > before
    assert pair.decode.metric(NIXL_BYTES) > 0


def test_several_at_once(pair: Pair) -> None:
    prompts = [list(prompt.token_ids) for prompt in pair.reference.prompts]
    chosen = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))[-6:]
    asked = [
        Pending(pair.port, completion(prompts[at], len(pair.reference.expected[at])))
        for at in chosen
    ]
    for at, pending in zip(chosen, asked, strict=True):
        reply = pending.reply(240)
        assert reply.status == 200, reply.raw[:500]
        assert reply.tokens == [pair.reference.expected[at]], f"prompt {at}"
