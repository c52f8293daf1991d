"""The two legs of a request asked by hand, and a stream whose chunks are stamped as they come."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from hetero_kv.demo.engines import HOST, MODEL_NAME, Engine

ANSWER_BYTES_MAX = 16 << 20
TIMEOUT_S = 120.0


class BenchError(Exception):
    """A request that did not do what the bench needs; no figure comes of such a run."""


def completion(prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy request for exactly `tokens` tokens."""
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def post(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """One request and its answer. Raises `BenchError` unless it is a 200 with an object."""
    connection = http.client.HTTPConnection(HOST, engine.port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        raw = response.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise BenchError(f"{engine.name}: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise BenchError(f"{engine.name} answered {response.status}: {raw[:300]!r}")
    answer = json.loads(raw)
    if not isinstance(answer, dict):
        raise BenchError(f"{engine.name} answered no object: {raw[:300]!r}")
    return answer


def prefill(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    """The prefill leg; the params for the decode leg."""
    leg = {
        **body,
        "max_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }
    params = post(engine, leg).get("kv_transfer_params")
    if not isinstance(params, dict):
        raise BenchError(f"{engine.name} handed no kv_transfer_params over")
    return params


class Background:
    """A request under way in a thread of its own."""

    def __init__(self, engine: Engine, body: dict[str, Any]) -> None:
        self.answer: dict[str, Any] | None = None
        self.error: BenchError | None = None
        self.finished_at_s = 0.0
        self._thread = threading.Thread(target=self._ask, args=(engine, body), daemon=True)
        self._thread.start()

    def _ask(self, engine: Engine, body: dict[str, Any]) -> None:
        try:
            self.answer = post(engine, body)
        except BenchError as error:
            self.error = error
        finally:
            self.finished_at_s = time.monotonic()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> dict[str, Any]:
        """The answer; raises what went wrong."""
        self._thread.join(TIMEOUT_S + 5)
        if self.error is not None:
            raise self.error
        if self.answer is None:
            raise BenchError("no answer in time")
        return self.answer


class Stream:
    """Streamed requests one after another, each as soon as the last has ended, until `leave`.

    `chunks` counts what came of all of them. Nothing is parsed: a client that works for each
    token would take the processor from the engine that it measures.
    """

    def __init__(self, engine: Engine, first: dict[str, Any], others: dict[str, Any]) -> None:
        self.chunks = 0
        self.error: str = ""
        self._port = engine.port
        self._socket: socket.socket | None = None
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(first, others), daemon=True)
        self._thread.start()

    def _read(self, first: dict[str, Any], others: dict[str, Any]) -> None:
        try:
            self._read_one(first)
            while not self._left.is_set():
                self._read_one(others)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if not self._left.is_set():
                self.error = repr(error)

    def _read_one(self, body: dict[str, Any]) -> None:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=TIMEOUT_S)
        try:
            connection.connect()
            self._socket = connection.sock
            self._read_answer(connection, json.dumps({**body, "stream": True}))
        finally:
            connection.close()

    def _read_answer(self, connection: http.client.HTTPConnection, body: str) -> None:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"{response.status}: {response.read(300)!r}")
        while not self._left.is_set() and (line := response.readline(ANSWER_BYTES_MAX)):
            if line.startswith(b"data: {"):
                self.chunks += 1
                if b'"error"' in line:
                    raise ValueError(repr(line[:300]))

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Closes the connection; the engine aborts the request. Raises what broke the stream."""
        self._left.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        if self.error:
            raise BenchError(f"a stream broke: {self.error}")


def wait_until(condition, timeout_s: float, what: str) -> None:  # type: ignore[no-untyped-def]
    """Returns when `condition()` is true; a `BenchError` naming `what` at the deadline."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise BenchError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.02)
