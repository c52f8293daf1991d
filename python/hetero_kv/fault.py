"""Fault injection for tests and demonstrations: ``HETERO_KV_FAULT``. Off unless asked for.

``flip-source`` on a prefill engine flips the sign bit of every element of the KV of each prompt it
hands off, after the forward pass that completed it and before anybody can read it. Bytes moved stay
the same and the tokens that decode produces change: the negative control that tells a transfer from
a recomputation with the same text. ``flip-source:MARK`` does so only to requests whose id contains
MARK, so that one engine serves both the honest requests and the control.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

FLIP_SOURCE = "flip-source"
FAULTS = (FLIP_SOURCE,)


def fault() -> str | None:
    """The fault asked for; raises ``ValueError`` for an unknown one."""
    name = os.environ.get("HETERO_KV_FAULT", "").partition(":")[0]
    if name and name not in FAULTS:
        raise ValueError(f"hetero_kv: HETERO_KV_FAULT is {name!r}; it can be {', '.join(FAULTS)}")
    return name or None


def fault_mark() -> str:
    """What the ids of the requests contain that the fault is for; empty: it is for all."""
    return os.environ.get("HETERO_KV_FAULT", "").partition(":")[2]


class FlipSource:
    """Scheduler side: finds the blocks of prompts that this step completes."""

    def __init__(self, mark: str = "") -> None:
        self._mark = mark
        self._prompts: dict[str, int] = {}

    def add(self, request: Any) -> None:
        """A request whose KV will be handed off."""
        if self._mark in request.request_id:
            self._prompts[request.request_id] = request.num_prompt_tokens

    def discard(self, request_id: str) -> None:
        """The request has ended."""
        self._prompts.pop(request_id, None)

    def blocks(self, scheduler_output: Any, kv_cache_manager: Any) -> list[int]:
        """Blocks to flip after this step's forward pass, each prompt's once."""
        new = scheduler_output.scheduled_new_reqs
        computed = {request.req_id: request.num_computed_tokens for request in new}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        flipped: list[int] = []
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            prompt = self._prompts.get(request_id)
            if prompt is None or computed.get(request_id, 0) + scheduled < prompt:
                continue
            del self._prompts[request_id]
            for group in kv_cache_manager.get_block_ids(request_id):
                flipped.extend(group)
        return flipped


def flip(tensors: Iterable[Any], blocks: list[int]) -> None:
    """Worker side: flips the sign bit of every element of these blocks, in every layer."""
    for tensor in tensors:
        tensor[blocks] = -tensor[blocks]
