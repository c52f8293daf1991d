"""The connector with a clock: notes when the engine's scheduler hands out each step.

Loaded by vLLM through `kv_connector_module_path`. `build_connector_meta` runs once per step in the
engine's own process, so that neither the API server nor a client is in the time between two of
them. Each record is two 64-bit numbers: nanoseconds of the monotonic clock and the tokens that
the step computes. They go to the file that `HETERO_KV_BENCH_STEPS` names.
"""

from __future__ import annotations

import array
import os
import time
from typing import Any

from hetero_kv.connector import HeteroKVConnector

STEPS_ENV = "HETERO_KV_BENCH_STEPS"
RECORDS_PER_WRITE = 128


class SteppingConnector(HeteroKVConnector):
    """`HeteroKVConnector`, stamping steps on its scheduler side."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._records = array.array("q")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self._records.append(time.monotonic_ns())
        self._records.append(scheduler_output.total_num_scheduled_tokens)
        if len(self._records) >= 2 * RECORDS_PER_WRITE:
            with open(os.environ[STEPS_ENV], "ab") as file:
                file.write(self._records.tobytes())
            del self._records[:]
        return super().build_connector_meta(scheduler_output)
