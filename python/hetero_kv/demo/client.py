"""A small client of the OpenAI completions API: one request, streamed or not, with its timing."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hetero_kv.demo.engines import HOST, MODEL_NAME
from hetero_kv.demo.prompts import Prompt

ANSWER_BYTES_MAX = 16 << 20


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back for one prompt. `error` is empty when all is well.

    Times are of this client's clock, in milliseconds from the moment the request was sent;
    `engine_*` are the answering engine's own, None when it gave none. `cached_tokens` are the
    prompt tokens that the answering engine did not compute.
    """

    request_id: str
    status: int
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    first_ms: float | None = None
    total_ms: float = 0.0
    engine_queue_ms: float | None = None
    engine_first_ms: float | None = None
    engine_generation_ms: float | None = None
    error: str = ""


def complete(
    port: int,
    prompt: Prompt,
    tokens_max: int,
    request_id: str,
    cache_salt: str,
    timeout_s: float,
    dp_rank: int | None = None,
) -> Answer:
    """Asks for a greedy completion of exactly `tokens_max` tokens; never raises for the peer.

    `dp_rank` names an engine of a vLLM server that is asked directly, without a proxy.
    """
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": list(prompt.token_ids),
        "max_tokens": tokens_max,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        # Blocks cached under another salt are not used: each pass moves its own KV.
        "cache_salt": cache_salt,
        "stream": prompt.stream,
    }
    if prompt.stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    if dp_rank is not None:
        headers["X-data-parallel-rank"] = str(dp_rank)
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    sent_s = time.monotonic()

    def elapsed_ms() -> float:
        return (time.monotonic() - sent_s) * 1000

    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200 or not prompt.stream:
            raw = response.read(ANSWER_BYTES_MAX)
            if response.status != 200:
                return Answer(
                    request_id,
                    response.status,
                    total_ms=elapsed_ms(),
                    error=f"HTTP {response.status}: {raw[:300].decode(errors='replace')}",
                )
            answer = _read_parts(request_id, [json.loads(raw)])
            return dataclasses.replace(answer, total_ms=elapsed_ms())
        return _read_stream(request_id, response, elapsed_ms)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        return Answer(request_id, 0, total_ms=elapsed_ms(), error=f"{error!r}")
    finally:
        connection.close()


def _read_stream(
    request_id: str, response: http.client.HTTPResponse, elapsed_ms: Callable[[], float]
) -> Answer:
    """Reads server-sent events up to `[DONE]`; a stream without it is an error."""
    parts: list[dict[str, Any]] = []
    first_ms = None
    read_bytes = 0
    while line := response.readline(ANSWER_BYTES_MAX):
        read_bytes += len(line)
        if read_bytes > ANSWER_BYTES_MAX:
            raise ValueError(f"a stream of more than {ANSWER_BYTES_MAX} bytes")
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            answer = _read_parts(request_id, parts)
            return dataclasses.replace(answer, first_ms=first_ms, total_ms=elapsed_ms())
        part = json.loads(data)
        if "error" in part:
            return Answer(
                request_id, 200, total_ms=elapsed_ms(), error=f"in the stream: {part['error']}"
            )
        if first_ms is None and any(choice.get("token_ids") for choice in part["choices"]):
            first_ms = elapsed_ms()
        parts.append(part)
    return Answer(request_id, 200, total_ms=elapsed_ms(), error="the stream ended without [DONE]")


def _read_parts(request_id: str, parts: Sequence[dict[str, Any]]) -> Answer:
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for part in parts:
        for choice in part["choices"]:
            tokens.extend(choice.get("token_ids") or ())
        usage = part.get("usage") or usage
        metrics = part.get("metrics") or metrics
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        request_id,
        200,
        token_ids=tuple(tokens),
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=details.get("cached_tokens"),
        engine_queue_ms=metrics.get("queue_time_ms"),
        engine_first_ms=metrics.get("time_to_first_token_ms"),
        engine_generation_ms=metrics.get("generation_time_ms"),
    )


def complete_all(
    port: int,
    prompts: Sequence[Prompt],
    tokens_max: int,
    pass_name: str,
    timeout_s: float,
) -> list[Answer]:
    """Sends all prompts at the same moment; answers in the order of the prompts.

    Request ids are ``PASS-INDEX``; the engines' own ids contain them.
    """
    gate = threading.Barrier(len(prompts))

    def ask(prompt: Prompt) -> Answer:
        gate.wait(timeout_s)
        request_id = f"{pass_name}-{prompt.index:03d}"
        return complete(port, prompt, tokens_max, request_id, pass_name, timeout_s)

    pool = concurrent.futures.ThreadPoolExecutor(len(prompts))
    try:
        return list(pool.map(ask, prompts))
    finally:
        # Not waited for after an interrupt: the requests end when the engines do.
        pool.shutdown(wait=False)
