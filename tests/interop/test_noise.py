"""Ports against whatever comes in, while requests go on beside it."""

from __future__ import annotations

import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from .caches import Model
from .conftest import MakeEngine
from .harness import PATIENCE_S, Engine, tokens

GQA = Model(kv_heads=4)
MAGIC = b"hK\x01"
# A begun frame has to be whole, and a stranger accepted, within the default of both planes.
FRAME_TIMEOUT_S = 10.0


def header(kind: int, length: int) -> bytes:
    return MAGIC + bytes([kind]) + struct.pack("<I", length)


HELLO, LAYOUT, CLAIM, PING, ATTACH, FETCH, OFFER = 1, 4, 5, 11, 32, 34, 64

# Each closes its connection at once.
BROKEN = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "zeros": bytes(4096),
    "random": os.urandom(100_000),
    "another version": b"hK\x09\x01\0\0\0\0",
    "unknown kind": b"hK\x01\xff\0\0\0\0",
    "4 GiB announced": header(HELLO, 0xFFFF_FFFF),
    "long frame of a stranger": header(HELLO, 1 << 20) + bytes(1 << 20),
    "not the map": header(HELLO, 3) + b"abc",
    "nested bomb": header(HELLO, 60_000) + b"\x91" * 60_000,
    "layout before hello": header(LAYOUT, 1) + b"\x80",
    "claim before hello": header(CLAIM, 1) + b"\x80",
    "fetch before attach": header(FETCH, 1) + b"\x80",
    "push mode": header(OFFER, 1) + b"\x80",
}

# These owe something, and are given up after a while.
OWING = {
    "nothing": b"",
    "half a header": MAGIC,
    "half a payload": header(HELLO, 100) + b"\x85",
    "a ping and no hello": header(PING, 1) + b"\x80",
}


@pytest.fixture
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"needs 4096 descriptors, the hard limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def dial(port: int) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def say(connection: socket.socket, said: bytes) -> None:
    try:
        connection.sendall(said)
    except (BrokenPipeError, ConnectionResetError):
        # Closed on the first bytes already.
        return


def wait_closed(connection: socket.socket, timeout: float) -> bool:
    """Whether the other side closes it in time; what it says before does not matter."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            if connection.recv(65_536) == b"":
                return True
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
    return False


def load_one(p: Engine, d: Engine, salt: int) -> None:
    load = d.loaded(d.decode(p.prefill(tokens(5 + salt % 20, salt))))
    assert load.ok, load.text


def ports_of(p: Engine) -> list[int]:
    """The control port and the data port of a one-rank engine."""
    assert p.port is not None
    data = p.rank_ask(0, "data_port")
    assert data is not None
    return [p.port, data]


def test_garbage_on_every_port(make_engine: MakeEngine) -> None:
    settings = {"transport": "tcp"}
    p = make_engine("p", GQA, producer=True, settings=settings)
    d = make_engine("d", GQA, producer=False, settings=settings)
    load_one(p, d, 0)

    def flood(rounds: int) -> None:
        for round_ in range(rounds):
            for salt, (name, said) in enumerate(BROKEN.items()):
                for port in ports_of(p):
                    with dial(port) as connection:
                        say(connection, said)
                        assert wait_closed(connection, PATIENCE_S), (name, port)
                if salt % 5 == 0:
                    load_one(p, d, 20 * round_ + salt)

    flood(1)
    before = usage(p)
    flood(6)
    after = usage(p)
    for name, was, now in zip(["scheduler", "rank"], before, after, strict=True):
        assert now["rss_kib"] - was["rss_kib"] < 4096, (name, was, now)
        assert now["descriptors"] <= was["descriptors"], (name, was, now)
    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()
    assert d.figures()["counters"]["reconnects"] == 0


@pytest.mark.usefixtures("_many_descriptors")
def test_silence_slowness_and_a_thousand_connections(make_engine: MakeEngine) -> None:
    """More strangers than the control port takes, on top of slow ones on both ports: a new decode
    engine still pairs at once, and all of them are gone after the frame timeout."""
    settings = {"transport": "tcp"}
    p = make_engine("p", GQA, producer=True, settings=settings)
    d = make_engine("d", GQA, producer=False, settings=settings)
    load_one(p, d, 0)
    control, data = ports_of(p)
    before = usage(p)
    with ExitStack() as stack:
        started = time.monotonic()
        owing = []
        for port in (data, control):
            for name, said in OWING.items():
                if name == "a ping and no hello" and port == data:
                    continue
                connection = stack.enter_context(dial(port))
                say(connection, said)
                owing.append((name, port, connection))
            slow = stack.enter_context(dial(port))
            owing.append(("a byte now and then", port, slow))
        crowd = [stack.enter_context(dial(control)) for _ in range(1200)]
        late = make_engine("late", GQA, producer=False, settings=settings)
        load_one(p, late, 1)
        salt = 2
        hello = header(HELLO, 50_000) + bytes(1000)
        sent = 0
        while time.monotonic() - started < FRAME_TIMEOUT_S - 1:
            load_one(p, d, salt)
            load_one(p, late, salt + 1)
            salt += 2
            for name, _, connection in owing:
                if name == "a byte now and then":
                    say(connection, hello[sent : sent + 1])
            sent += 1
            time.sleep(0.2)
        for name, port, connection in owing:
            assert wait_closed(connection, PATIENCE_S), (name, port)
        with selectors.DefaultSelector() as selector:
            for connection in crowd:
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
            deadline = time.monotonic() + PATIENCE_S
            while selector.get_map() and time.monotonic() < deadline:
                for key, _ in selector.select(1):
                    selector.unregister(key.fileobj)
            assert not selector.get_map(), "connections that say nothing stay open"
    load_one(p, d, 1000)
    load_one(p, late, 1001)
    after = usage(p)
    # The new engine's control and data connection, and the thread that serves the latter.
    assert after[0]["descriptors"] <= before[0]["descriptors"] + 1
    assert after[1]["descriptors"] <= before[1]["descriptors"] + 1
    assert after[1]["threads"] <= before[1]["threads"] + 1
    for engine in (d, late):
        engine.check_bytes()
    for engine in (p, d, late):
        engine.assert_clean()
        assert engine.producer or engine.figures()["counters"]["reconnects"] == 0


def usage(p: Engine) -> list[dict[str, int]]:
    return [p.figures()["process"], p.rank_ask(0, "figures")]
