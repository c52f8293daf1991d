"""A trace for tests and demonstrations: one JSON line per event into the file that
``HETERO_KV_TRACE`` names. All processes of an engine append to the same file; a line is one write.

Events: ``allocated`` (scheduler side: tokens that vLLM takes from outside for a request) and
``load`` (each worker: bytes moved and planned, sources, outcome).
"""

from __future__ import annotations

import json
import os
from typing import Any


class Trace:
    """Writes nothing unless ``HETERO_KV_TRACE`` is set."""

    def __init__(self) -> None:
        self._path = os.environ.get("HETERO_KV_TRACE")

    def __bool__(self) -> bool:
        return bool(self._path)

    def write(self, event: str, **fields: Any) -> None:
        """Appends one line. A file that cannot be written is the tracer's loss, not a request's."""
        if not self._path:
            return
        line = json.dumps({"event": event, **fields}) + "\n"
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError:
            self._path = None
