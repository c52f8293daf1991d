"""Pairs and params that cannot be served: refused by name, one request at a time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .caches import Model
from .conftest import MakeEngine
from .harness import EngineStartError, tokens
from .ports import free_range

GQA = Model(kv_heads=4)


def test_unlike_field_is_named_with_both_values(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True, fields={"dtype": "float16"})
    d = make_engine("d", GQA, producer=False)
    for salt in range(2):
        load = d.loaded(d.decode(p.prefill(tokens(9, salt))))
        assert load.reasons == {"pair_refused"}
        assert load.fields == {"dtype"}
        assert "float16" in load.text
        assert "bfloat16" in load.text
        assert load.bytes_read == 0
    assert ["pair_refused", "dtype", 2] in d.figures()["failures"]
    # The second did not ask again.
    assert p.figures()["counters"]["peers_rejected"] == 1
    d.assert_clean()
    d.check_bytes()
    # Nobody who may speak to it can release them.
    p.ask("revoke")
    p.assert_clean()


def test_indivisible_tp_sizes_are_refused(make_engine: MakeEngine) -> None:
    model = Model(kv_heads=6)
    p = make_engine("p", model, 3, producer=True)
    d = make_engine("d", model, 2, producer=False)
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    assert load.reasons == {"pair_refused"}
    assert load.fields == {"tp_size"}
    assert "3" in load.text
    assert "2" in load.text
    p.ask("revoke")
    for engine in (p, d):
        engine.assert_clean()


@pytest.mark.parametrize(
    ("ours", "theirs", "fields", "reason", "field", "words"),
    [
        ({"opaque": True}, {"opaque": True}, {}, "pair_refused", "page_format",
         ["prefill has TEST, whole pages of 16 tokens", "decode has TEST, whole pages of 32"]),
        ({}, {"opaque": True}, {}, "pair_refused", "page_format", ["by token", "pages of 16"]),
        ({"block_size": 24}, {}, {}, "pair_refused", "block_size", ["16", "24", "divide"]),
        # Fields that hide it: the plan sees it.
        ({"opaque": True}, {"opaque": True}, {"page_format": "hidden"}, "plan", "", ["row_bytes"]),
        ({"opaque": True}, {}, {"page_format": "hidden"}, "plan", "", ["opaque pages", "16", "32"]),
    ],
)  # fmt: skip
def test_unlike_block_sizes_without_a_converter_are_refused_by_name(
    make_engine: MakeEngine,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    fields: dict[str, str],
    reason: str,
    field: str,
    words: list[str],
) -> None:
    model_p = Model(kv_heads=4, **{"block_size": 16, **theirs})
    model_d = Model(kv_heads=4, **{"block_size": 32, **ours})
    p = make_engine("p", model_p, producer=True, fields=fields)
    d = make_engine("d", model_d, producer=False, fields=fields)
    load = d.loaded(d.decode(p.prefill(tokens(40))))
    assert load.reasons == {reason}, load.text
    assert load.fields == {field}
    for word in words:
        assert word in load.text
    assert load.bytes_read == 0
    d.check_bytes()
    p.ask("revoke")
    for engine in (p, d):
        engine.assert_clean()


def test_unlike_scales_are_refused_by_layer_with_both_values(make_engine: MakeEngine) -> None:
    """Bytes of a quantized cache are only right with the scales they were made with."""
    from hetero_kv.layout import kv_scales

    same = {f"model.layers.{i}.self_attn.attn": "0.5/0.25" for i in range(60)}
    other = {**same, "model.layers.41.self_attn.attn": "0.5/0.125"}
    last = {**same, "model.layers.59.self_attn.attn": "0.75/0.25"}
    p = make_engine("p", GQA, producer=True, fields={"kv_scales": kv_scales(other)})
    d = make_engine("d", GQA, producer=False, fields={"kv_scales": kv_scales(last)})
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    assert load.fields == {"kv_scales"}
    for word in (
        "41.self_attn.attn=0.5/0.125",
        "41.self_attn.attn=0.5/0.25",
        "59.self_attn.attn=0.75",
    ):
        assert word in load.text
    assert "model.layers.40" not in load.text
    assert load.bytes_read == 0
    p.ask("revoke")
    twin = make_engine("e", GQA, producer=False, fields={"kv_scales": kv_scales(other)})
    load = twin.loaded(twin.decode(p.prefill(tokens(9, 1))))
    assert load.ok, load.text
    twin.check_bytes()
    for engine in (p, d, twin):
        engine.assert_clean()


@pytest.mark.parametrize(
    ("change", "reason", "field", "words"),
    [
        ({"remote_port": "other"}, "pair_refused", "remote_engine_id", ["p0", "p1"]),
        ({"remote_port": "free"}, "unreachable", "", ["127.0.0.1", "refused"]),
        ({"remote_host": "host.invalid"}, "unreachable", "", ["host.invalid"]),
        ({"remote_incarnation": "0" * 16}, "pair_refused", "remote_incarnation", ["0" * 16]),
        ({"remote_engine_id": "d"}, "bad_params", "remote_engine_id", ["names this engine"]),
        ({"tp_size": 2}, "bad_params", "tp_size", ["is 2", "has 1"]),
        ({"remote_dp_rank": 5}, "bad_params", "remote_dp_rank", ["is 5", "has 0"]),
        ({"lease_epoch": 999}, "lease_gone", "", ["Foreign"]),
        ({"transfer_id": "ab" * 16}, "lease_gone", "", ["Unknown"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_params_that_name_something_else(
    make_engine: MakeEngine, change: dict[str, Any], reason: str, field: str, words: list[str]
) -> None:
    ps = [make_engine(f"p{i}", GQA, producer=True) for i in range(2)]
    d = make_engine("d", GQA, producer=False)
    prefill = ps[0].prefill(tokens(9))
    assert prefill.params is not None
    elsewhere = {"other": ps[1].port, "free": free_range(1)[0]}
    change = {key: elsewhere.get(value, value) for key, value in change.items()}
    load = d.loaded(d.decode(prefill, params={**prefill.params, **change}))
    assert load.reasons == {reason}, load
    assert load.fields == {field}
    assert load.bytes_read == 0
    for word in words:
        assert word in load.text
    # It has not hurt the right pair.
    load = d.loaded(d.decode(ps[0].prefill(tokens(9, 1))))
    assert load.ok, load.text
    d.check_bytes()
    for p in ps:
        # The first prompt's own lease runs on where nobody could be told.
        p.ask("revoke")
    for engine in [*ps, d]:
        engine.assert_clean()


KEYS = [
    "hetero_version",
    "transfer_id",
    "remote_engine_id",
    "remote_incarnation",
    "remote_host",
    "remote_port",
    "remote_dp_rank",
    "remote_request_id",
    "tp_size",
    "pp_size",
    "remote_block_ids",
    "remote_num_tokens",
    "lease_epoch",
    "prompt_digest",
]


def test_params_with_a_fault_fail_that_request_only(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True)
    d = make_engine("d", GQA, producer=False)
    prefill = p.prefill(tokens(9))
    assert prefill.params is not None
    assert set(KEYS) < set(prefill.params)
    for key in KEYS:
        without = {k: v for k, v in prefill.params.items() if k != key}
        for params in [without, *({**prefill.params, key: v} for v in _wrong(key))]:
            load = d.loaded(d.decode(prefill, params=params))
            assert load.reasons == {"bad_params"}, (key, load)
            assert load.fields == {key}
            assert key in load.text
            assert len(load.text) < 4096
            assert load.bytes_read == 0
    for text in ["", "{", "[]", '"text"', "[" * 100_000, "1e999"]:
        load = d.loaded(d.decode(prefill, params=text))
        assert load.reasons == {"bad_params"}
        assert load.fields == {"*"}
    load = d.loaded(d.decode(prefill))
    assert load.ok, load.text
    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()


def _wrong(key: str) -> list[Any]:
    huge = "x" * 2_000_000
    return {
        "remote_block_ids": [7, huge, [7], [["x"]], [[-1]], [[2**40]]],
        "remote_host": [7, huge, "", "a\nb"],
        "remote_engine_id": [7, huge, ""],
        "remote_request_id": [7, huge],
        "transfer_id": [7, huge, "ab", "g" * 32],
        "prompt_digest": [7, huge, "ab"],
        "remote_incarnation": [7, huge, "ab", "+" + "0" * 15],
    }.get(key, [[], huge, -1, 2**80, 1.5, "x", {}])


def test_another_prompt_is_computed_here_and_the_lease_goes_back(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True)
    d = make_engine("d", GQA, producer=False)
    strict = make_engine("strict", GQA, producer=False, settings={"require_kv": True})
    prefill = p.prefill(tokens(9))
    request = d.decode(prefill, token_ids=tokens(9, 1))
    d.wait_event("local", request.request_id)
    p.wait_event("released", prefill.request_id)
    assert d.figures()["counters"]["digest_mismatches"] == 1
    prefill = p.prefill(tokens(9, 2))
    load = strict.loaded(strict.decode(prefill, token_ids=tokens(9, 3)))
    assert load.reasons == {"digest_mismatch"}
    assert load.fields == {"prompt_digest"}
    p.wait_event("released", prefill.request_id)
    for engine in (p, d, strict):
        engine.check_bytes() if not engine.producer else None
        engine.assert_clean()


def test_transfer_id_of_the_router_is_kept_once(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True)
    d = make_engine("d", GQA, producer=False)
    asked = {"do_remote_decode": True, "transfer_id": "cd" * 16}
    first = p.prefill(tokens(9), asked)
    assert first.params is not None
    assert first.params["transfer_id"] == "cd" * 16
    second = p.prefill(tokens(9, 1), asked)
    assert second.params is None
    assert second.refused is not None
    assert "belongs to another request" in second.refused
    wrong: list[Any] = [5, "x"]
    for bad in wrong:
        refused = p.prefill(tokens(9, 2), {"do_remote_decode": True, "transfer_id": bad})
        assert refused.params is None
        assert "transfer_id" in (refused.refused or "")
    assert d.loaded(d.decode(first)).ok
    for engine in (p, d):
        engine.assert_clean()


def test_more_prompts_than_lease_slots(make_engine: MakeEngine) -> None:
    """What finds no slot is not held; it is told so and its blocks are freed."""
    p = make_engine("p", GQA, producer=True, settings={"lease_slots": 2})
    d = make_engine("d", GQA, producer=False)
    held = [p.prefill(tokens(9, salt)) for salt in range(2)]
    refused = p.prefill(tokens(9, 2))
    assert refused.params is None
    assert "no free lease slot" in (refused.refused or "")
    assert p.figures()["counters"]["offers_refused"] == 1
    for prefill in held:
        assert d.loaded(d.decode(prefill)).ok
        p.wait_event("released", prefill.request_id)
    assert p.prefill(tokens(9, 3)).params is not None
    p.ask("revoke")
    for engine in (p, d):
        engine.assert_clean()


def test_exhausted_port_range_says_how_many_are_needed(make_engine: MakeEngine) -> None:
    first, last = free_range(2)
    settings = {"port_range": f"{first}-{last}"}
    # Two ranks take both; nothing is left for the control listener.
    with pytest.raises(EngineStartError) as failed:
        make_engine("p", GQA, 2, producer=True, settings=settings)
    text = str(failed.value)
    assert f"{first}-{last}" in text
    assert "port_range" in text
    assert "needs 3" in text
    # The same for a rank.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineStartError) as failed:
            make_engine("q", GQA, 1, producer=True, settings={"port_range": f"{port}-{port}"})
    assert f"{port}-{port}" in str(failed.value)
    assert "needs 2" in str(failed.value)


@pytest.mark.parametrize(
    ("host", "word"), [("192.0.2.1", "192.0.2.1"), ("host.invalid", "host.invalid")]
)
def test_address_that_is_not_ours(make_engine: MakeEngine, host: str, word: str) -> None:
    with pytest.raises(EngineStartError, match=word):
        make_engine("p", GQA, 1, producer=True, settings={"host": host})


def test_ipv6_and_names(make_engine: MakeEngine) -> None:
    for i, host in enumerate(["::1", "localhost"]):
        settings = {"host": host, "transport": "tcp"}
        p = make_engine(f"p{i}", GQA, producer=True, settings=settings)
        d = make_engine(f"d{i}", GQA, producer=False, settings={"transport": "tcp"})
        prefill = p.prefill(tokens(9))
        assert prefill.params is not None
        assert prefill.params["remote_host"] == host
        load = d.loaded(d.decode(prefill))
        assert load.ok, load.text
        d.check_bytes()
        for engine in (p, d):
            engine.assert_clean()


def test_transport_that_is_not_offered(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True, settings={"transport": "process"})
    d = make_engine("d", GQA, producer=False, settings={"transport": "tcp"})
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    assert load.reasons == {"unreachable"}
    assert "tcp is not offered" in load.text
    for engine in (p, d):
        engine.assert_clean()


SILENT = b""
CLOSING = None


@pytest.mark.parametrize(
    ("said", "reasons"),
    [
        pytest.param(SILENT, {"claim_timeout", "unreachable"}, id="nothing"),
        pytest.param(CLOSING, {"peer_lost"}, id="closes"),
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", {"peer_lost"}, id="http"),
        pytest.param(b"hK\x01\x02\xff\xff\xff\xff", {"peer_lost"}, id="4-gib-frame"),
        pytest.param(b"hK\x01\x02\x05\0\0\0abcde", {"peer_lost"}, id="no-such-payload"),
        pytest.param(
            b"hK\x01\x02\x05\0\0\0ab", {"claim_timeout", "unreachable"}, id="half-a-frame"
        ),
        pytest.param(
            b"hK\x01\x0b\x01\0\0\0\x80" * 5000, {"claim_timeout", "unreachable"}, id="pings"
        ),
        pytest.param(b"hK\x01\x06\x01\0\0\0\x80", {"peer_lost"}, id="granted-of-nothing"),
    ],
)
def test_a_port_that_speaks_something_else(
    make_engine: MakeEngine, said: bytes | None, reasons: set[str]
) -> None:
    """Params can name any address. Whatever is there, the request fails in time and others go
    on."""
    p = make_engine("p", GQA, producer=True)
    d = make_engine("d", GQA, producer=False, settings={"claim_timeout_s": 1})
    prefill = p.prefill(tokens(9))
    assert prefill.params is not None
    with _server(said) as port:
        params = {**prefill.params, "remote_port": port}
        started = time.monotonic()
        odd = d.decode(prefill, params=params)
        # Another id: the first one belongs to the engine that its first params named.
        other = p.prefill(tokens(9, 1))
        assert d.loaded(d.decode(other)).ok
        load = d.loaded(odd)
        assert load.reasons <= reasons, load
        assert load.at - started < 3
        d.assert_clean()
    d.check_bytes()
    p.ask("revoke")
    p.assert_clean()


@contextmanager
def _server(said: bytes | None) -> Iterator[int]:
    """Answers whoever connects with these bytes and stays; with ``None``, closes."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if said is None:
                connection.close()
                continue
            kept.append(connection)
            try:
                connection.sendall(said)
            except OSError:
                continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        # Unlike close alone, this ends the accept that waits.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
        for connection in kept:
            connection.close()
