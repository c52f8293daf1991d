"""The connector with a clock: notes when the engine's scheduler hands out each step, and how long
vLLM's threads were inside our hooks.

Loaded by vLLM through `kv_connector_module_path`. `build_connector_meta` runs once per step in the
engine's own process, so that neither the API server nor a client is in the time between two of
them. Two kinds of files, of 64-bit numbers:

- `HETERO_KV_BENCH_STEPS`: nanoseconds of the monotonic clock, and the tokens that the step
  computes.
- the same with `.hooks-PID` for each process of the engine, scheduler and workers: nanoseconds of
  the monotonic clock, and the nanoseconds spent in our hooks so far.
"""

from __future__ import annotations

import array
import functools
import os
import time
from collections.abc import Callable
from typing import Any

from hetero_kv.connector import HeteroKVConnector

STEPS_ENV = "HETERO_KV_BENCH_STEPS"
RECORDS_PER_WRITE = 128
# Hooks that vLLM calls in every step or for every request, of both sides.
HOOKS = (
    "bind_connector_metadata",
    "build_connector_meta",
    "clear_connector_metadata",
    "get_block_ids_with_load_errors",
    "get_finished",
    "get_kv_connector_stats",
    "get_num_new_matched_tokens",
    "on_new_request",
    "request_finished",
    "save_kv_layer",
    "start_load_kv",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
)


class Records:
    """Pairs of numbers, appended to a file some at a time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._records = array.array("q")

    def add(self, first: int, second: int) -> None:
        self._records.append(first)
        self._records.append(second)
        if len(self._records) >= 2 * RECORDS_PER_WRITE:
            with open(self._path, "ab") as file:
                file.write(self._records.tobytes())
            del self._records[:]


class SteppingConnector(HeteroKVConnector):
    """`HeteroKVConnector`, stamping steps on its scheduler side and its hooks on both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = os.environ[STEPS_ENV]
        self._steps = Records(path)
        self._hooks = Records(f"{path}.hooks-{os.getpid()}")
        self._inside_ns = 0
        for name in HOOKS:
            hook = getattr(self, name, None)
            if hook is not None:
                setattr(self, name, self._timed(hook))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_ns = time.monotonic_ns()
            try:
                return hook(*args, **kwargs)
            finally:
                end_ns = time.monotonic_ns()
                self._inside_ns += end_ns - begun_ns
                self._hooks.add(end_ns, self._inside_ns)

        return timed

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._steps.add(time.monotonic_ns(), scheduler_output.total_num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)
