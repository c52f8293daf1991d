"""Bytes that no peer of ours sends, for every port of an engine (docs/session-protocol.md)."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator

MAGIC = b"hK"
VERSION = 1
HELLO, PING, ATTACH = 1, 11, 32


def header(kind: int, payload_bytes: int, version: int = VERSION, magic: bytes = MAGIC) -> bytes:
    return magic + bytes([version, kind]) + struct.pack("<I", payload_bytes)


def hostile(seed: int) -> Iterator[tuple[str, bytes, bool]]:
    """(name, bytes, whether the holder must end the connection by itself)."""
    draw = random.Random(seed)
    yield "random bytes", draw.randbytes(4096), True
    yield "HTTP", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", True
    yield "another wire version", header(HELLO, 2, version=99) + b"\x80\x80", True
    yield "an unknown kind", header(200, 1) + b"\x80", True
    yield "a frame of the push mode", header(64, 1) + b"\x80", True
    yield "an oversized length", header(HELLO, 0xFFFF_FFFF), True
    yield "an oversized length for a data port", header(ATTACH, 17 << 20), True
    yield "deep nesting", header(HELLO, 60_000) + b"\x91" * 60_000, True
    yield "a payload that is no map", header(HELLO, 4) + b"\xc1\xc1\xc1\xc1", True
    yield "an attach that is no map", header(ATTACH, 4) + b"\xc1\xc1\xc1\xc1", True
    yield "a claim before hello", header(5, 1) + b"\x80", True
    yield "half a header", header(HELLO, 100)[:5], False
    yield "half a payload", header(HELLO, 5000) + b"\x80" * 40, False
    yield "nothing", b"", False


def send(host: str, port: int, sent: bytes, wait_s: float) -> bool:
    """Sends to a fresh connection; whether the other side ended it within `wait_s`."""
    with socket.create_connection((host, port), timeout=5.0) as connection:
        connection.settimeout(wait_s)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
        try:
            while connection.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True
        return True
