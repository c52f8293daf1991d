"""Clients and routers that people have, with our connector on real engines: the `openai` package,
`vllm bench serve`, and vllm-router in the place of our proxy.

What an answer has to be is what the prefill engine answers by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero_kv.demo.engines import HOST, MODEL_NAME, free_port, http_get, vllm_python
from hetero_kv.demo.processes import GuardedProcess
from hetero_kv.demo.witness import Counters, settle

from .conftest import References
from .fault_site import LEASE_S, Site, open_site, spec
from .legs import completion, post

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from peer_wheels import VLLM_ROUTER_PIN, WheelError, unpacked

openai = pytest.importorskip("openai")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]

SETTINGS = {"lease_s": 60, "claim_timeout_s": 60}
TEXT = "A prefill engine reads the whole prompt at once and writes keys and values"
MESSAGES = [
    {"role": "system", "content": "Each head of the cache belongs to one rank."},
    {"role": "user", "content": "How many boats lie in the harbour at noon?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "count_boats",
        "description": "Counts the boats of a harbour.",
        "parameters": {
            "type": "object",
            "properties": {"noon": {"type": "boolean"}},
            "required": ["noon"],
            "additionalProperties": False,
        },
    },
}
COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}
GREEDY: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "seed": 7}


@pytest.fixture(scope="module")
def site(references: References, engine_logs: Path) -> Iterator[Site]:
    reference = references.of("gqa")
    # A model of random weights would fill a tool call with blanks.
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    tools += ("--structured-outputs-config", json.dumps(COMPACT))
    specs = [spec(role, role, reference, SETTINGS, flags=tools) for role in ("prefill", "decode")]
    with open_site(specs, reference, engine_logs / "clients", ("prefill", "decode")) as site:
        yield site


@pytest.fixture(autouse=True)
def nothing_is_held(site: Site) -> Iterator[None]:
    yield
    site.require_nothing_held(within_s=LEASE_S)


def client(port: int) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://{HOST}:{port}/v1", api_key="none", max_retries=0, timeout=120
    )


@pytest.fixture
def ours(site: Site) -> openai.OpenAI:
    """Through the proxy: prefilled on one engine, decoded on the other."""
    return client(site.port)


@pytest.fixture
def alone(site: Site) -> openai.OpenAI:
    return client(site["prefill"].port)


@contextlib.contextmanager
def moved(site: Site, requests: int = 1) -> Iterator[None]:
    """Within it the decode engine takes KV from the other one, and computes one token a request."""
    engines = [site["decode"]]
    before = Counters.read(engines)
    yield
    after = settle(
        lambda: Counters.read(engines) - before, lambda now: now.computed_tokens >= requests
    )
    assert after.external_tokens > 0, after
    assert after.computed_tokens == requests, after


def test_completions(site: Site, ours: openai.OpenAI, alone: openai.OpenAI) -> None:
    asked = {**GREEDY, "prompt": TEXT, "max_tokens": 24}
    expected = alone.completions.create(**asked)
    with moved(site):
        answer = ours.completions.create(**asked)
    assert answer.choices[0].text == expected.choices[0].text != ""
    assert answer.usage == expected.usage
    with moved(site):
        chunks = list(
            ours.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        )
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == expected.choices[0].text
    assert chunks[-1].usage == expected.usage


def test_log_probabilities(site: Site, ours: openai.OpenAI, alone: openai.OpenAI) -> None:
    asked = {**GREEDY, "prompt": TEXT, "max_tokens": 8, "logprobs": 3}
    expected = alone.completions.create(**asked).choices[0].logprobs
    with moved(site):
        found = ours.completions.create(**asked).choices[0].logprobs
    assert len(found.tokens) == 8
    assert found.tokens == expected.tokens
    assert found.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)
    chat = {**GREEDY, "messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    expected_chat = alone.chat.completions.create(**chat).choices[0].logprobs.content
    with moved(site):
        found_chat = ours.chat.completions.create(**chat).choices[0].logprobs.content
    assert [item.token for item in found_chat] == [item.token for item in expected_chat]
    assert all(len(item.top_logprobs) == 2 for item in found_chat)


def test_chat(site: Site, ours: openai.OpenAI, alone: openai.OpenAI) -> None:
    asked = {**GREEDY, "messages": MESSAGES, "max_completion_tokens": 20}
    expected = alone.chat.completions.create(**asked)
    with moved(site):
        answer = ours.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected.choices[0].message.content != ""
    assert answer.choices[0].finish_reason == expected.choices[0].finish_reason
    with moved(site):
        chunks = list(ours.chat.completions.create(**asked, stream=True))
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == expected.choices[0].message.content


def test_tools(site: Site, ours: openai.OpenAI, alone: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "count_boats"}}
    asked = {
        **GREEDY,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": choice,
        "max_tokens": 200,
    }
    expected = alone.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    with moved(site):
        call = ours.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    assert call.function == expected
    with moved(site):
        deltas = [
            part.function
            for chunk in ours.chat.completions.create(**asked, stream=True)
            for choice in chunk.choices
            for part in choice.delta.tool_calls or ()
        ]
    assert [delta.name for delta in deltas if delta.name] == ["count_boats"]
    # Streamed it comes as the model wrote it. Whether it fits the schema is vLLM's affair.
    arguments = "".join(delta.arguments or "" for delta in deltas)
    assert json.loads(arguments) == json.loads(expected.arguments)


def test_errors_and_lists_are_the_packages_own(ours: openai.OpenAI) -> None:
    assert [model.id for model in ours.models.list()] == [MODEL_NAME]
    with pytest.raises(openai.NotFoundError):
        ours.completions.create(model="another", prompt=TEXT, max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        ours.completions.create(
            **GREEDY, prompt=TEXT, max_tokens=4, extra_body={"kv_transfer_params": {}}
        )
    with pytest.raises(openai.BadRequestError):
        ours.completions.create(**GREEDY, prompt=TEXT, max_tokens=100_000)


def test_vllm_bench_serve(site: Site, tmp_path: Path) -> None:
    """vLLM's own load generator through the proxy: every request completes, streamed, with as many
    tokens as it asked for, and KV moves."""
    requests, tokens = 24, 12
    before = Counters.read([site["decode"]])
    # What `vllm bench serve` runs. The `vllm` script asks for a distribution of that name, and the
    # CPU build has another one.
    program = (
        "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
        "serve.add_cli_args(parser); serve.main(parser.parse_args())"
    )
    command = [vllm_python(), "-c", program]
    command += ["--backend", "openai", "--base-url", f"http://{HOST}:{site.port}"]
    command += ["--endpoint", "/v1/completions", "--model", MODEL_NAME, "--ignore-eos"]
    command += ["--tokenizer", str(site.reference.model), "--dataset-name", "random"]
    command += ["--random-input-len", "96", "--random-output-len", str(tokens), "--seed", "5"]
    command += ["--num-prompts", str(requests), "--max-concurrency", "8", "--disable-tqdm"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
        env=_offline(),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["completed"], found.get("failed", 0)) == (requests, 0)
    assert found["total_output_tokens"] == requests * tokens
    # `bench serve` sends one request more to see whether the server answers.
    counted = settle(
        lambda: Counters.read([site["decode"]]) - before,
        lambda now: now.computed_tokens >= requests,
    )
    assert counted.external_tokens >= requests * 90
    assert counted.computed_tokens <= requests + 1


def _offline() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture
def vllm_router(site: Site, engine_logs: Path) -> Iterator[int]:
    """Its port: vllm-router in its NIXL mode between the same engines."""
    try:
        folder = unpacked(VLLM_ROUTER_PIN, dependencies=True)
    except WheelError as error:
        pytest.skip(str(error))
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--policy", "round_robin", "--kv-connector", "nixl", "--log-level", "warning"]
    command += ["--prefill", site["prefill"].url, "--decode", site["decode"].url]
    process = GuardedProcess(
        "vllm-router", command, engine_logs / "vllm-router.log", {"PYTHONPATH": str(folder)}
    )
    try:
        end = time.monotonic() + 60
        while True:
            assert process.poll() is None, process.log_tail()
            assert time.monotonic() < end, process.log_tail()
            with contextlib.suppress(OSError):
                if http_get(port, "/health", 2.0)[0] == 200:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.stop(5.0)


def test_behind_vllm_router(site: Site, vllm_router: int) -> None:
    prompt, expected = site.prompt(200)
    with moved(site):
        reply = post(vllm_router, completion(prompt))
    assert reply.status == 200, reply.raw[:500]
    # It passes `return_token_ids` on to decode, whose answer it returns.
    assert reply.tokens == [expected]
