"""The two legs of a request asked by hand, as a proxy would, and requests that can be left."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from hetero_kv.demo.client import ANSWER_BYTES_MAX
from hetero_kv.demo.engines import HOST, MODEL_NAME, Engine

TIMEOUT_S = 120.0
TOKENS = 16
PREFILL_PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclasses.dataclass(frozen=True)
class Reply:
    """Status 0: no answer came; `raw` then says why."""

    status: int
    body: dict[str, Any]
    raw: str

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """Token ids of each choice."""
        choices = sorted(self.body.get("choices", ()), key=lambda choice: choice["index"])
        return [tuple(choice.get("token_ids") or ()) for choice in choices]

    @property
    def params(self) -> dict[str, Any]:
        """What a prefill engine hands over."""
        params = self.body.get("kv_transfer_params")
        assert isinstance(params, dict), f"no kv_transfer_params: {self.status} {self.raw[:300]}"
        return params


def completion(
    prompt: Sequence[int] | Sequence[Sequence[int]], tokens: int = TOKENS, **more: Any
) -> dict[str, Any]:
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


def post(
    port: int,
    body: dict[str, Any],
    path: str = "/v1/completions",
    timeout_s: float = TIMEOUT_S,
) -> Reply:
    """One request and its whole answer; never raises for the peer."""
    return Pending(port, body, path, timeout_s).reply(timeout_s + 5)


class Pending:
    """A request under way in a thread of its own."""

    def __init__(
        self,
        port: int,
        body: dict[str, Any],
        path: str = "/v1/completions",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
        self._reply = Reply(0, {}, "no answer yet")
        # When the answer was complete, by time.monotonic().
        self.ended_s: float | None = None
        self.first_bytes = threading.Event()
        self._connection.connect()
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._ask, args=(path, body), daemon=True)
        self._thread.start()

    def _ask(self, path: str, body: dict[str, Any]) -> None:
        try:
            self._connection.request(
                "POST", path, json.dumps(body), {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            head = response.read1(4096)
            self.first_bytes.set()
            raw = (head + response.read(ANSWER_BYTES_MAX)).decode(errors="replace")
            parsed: Any = {}
            with contextlib.suppress(ValueError):
                parsed = json.loads(raw)
            self._reply = Reply(response.status, parsed if isinstance(parsed, dict) else {}, raw)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self._reply = Reply(0, {}, repr(error))
        finally:
            self.ended_s = time.monotonic()
            self.first_bytes.set()
            self._connection.close()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def reply(self, timeout_s: float = TIMEOUT_S) -> Reply:
        """Waits for the answer. An `AssertionError` when none comes in time."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"no answer within {timeout_s} s"
        return self._reply

    def leave(self) -> None:
        """What a client does that goes away: the connection is gone."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)


def prefill(engine: Engine, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    """The prefill leg; returns the params for the decode leg."""
    leg = {**body, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
    return post(engine.port, leg, path).params


def decode(
    engine: Engine, body: dict[str, Any], params: Any, path: str = "/v1/completions"
) -> Reply:
    """The decode leg with these params."""
    return post(engine.port, {**body, "kv_transfer_params": params}, path)
