"""Ports that are free at this moment."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_range(count: int) -> tuple[int, int]:
    """First and last of so many free ports in a row on 127.0.0.1."""
    for _ in range(200):
        with ExitStack() as stack:
            probe = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            first: int = probe.getsockname()[1]
            try:
                for port in range(first + 1, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return first, first + count - 1
    raise AssertionError(f"no {count} free ports in a row")
