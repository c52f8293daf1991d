"""Engines that are paired before any request names them (the setting ``connect``)."""

from __future__ import annotations

import time

from .caches import Model
from .conftest import MakeEngine
from .harness import Engine, tokens
from .ports import free_range

GQA = Model(kv_heads=4)


def dials(d: Engine) -> int:
    count: int = d.figures()["counters"]["dials"]
    return count


def test_the_first_request_finds_the_pair_made(make_engine: MakeEngine) -> None:
    ps = [make_engine(f"p{i}", GQA, producer=True, dp_rank=i) for i in range(2)]
    settings = {"connect": [f"127.0.0.1:{p.port}" for p in ps]}
    d = make_engine("d", GQA, 2, producer=False, settings=settings)
    d.wait_gauge("peers_ready", 2)
    assert dials(d) == 2
    for salt in range(4):
        load = d.loaded(d.decode(ps[salt % 2].prefill(tokens(9, salt))))
        assert load.ok, load.text
    assert dials(d) == 2
    assert d.figures()["counters"]["reconnects"] == 0
    d.check_bytes()
    for engine in (*ps, d):
        engine.assert_clean()


def test_without_the_setting_the_first_request_dials(make_engine: MakeEngine) -> None:
    """What the other tests' counts rest on."""
    p = make_engine("p", GQA, producer=True)
    d = make_engine("d", GQA, producer=False)
    assert dials(d) == 0
    assert d.loaded(d.decode(p.prefill(tokens(9)))).ok
    assert dials(d) == 1


def test_an_engine_that_is_not_there_yet_is_tried_again_and_a_restarted_one_too(
    make_engine: MakeEngine,
) -> None:
    first, last = free_range(3)
    settings = {"port_range": f"{first}-{last}", "transport": "process"}
    d = make_engine("d", GQA, producer=False, settings={"connect": f"127.0.0.1:{first}"})
    deadline = time.monotonic() + 30
    while dials(d) < 2:
        assert time.monotonic() < deadline, "not tried again"
        time.sleep(0.02)
    assert d.gauge("peers_ready") == 0
    # Other engines are read meanwhile.
    other = make_engine("other", GQA, producer=True)
    assert d.loaded(d.decode(other.prefill(tokens(9)))).ok
    d.wait_gauge("peers_ready", 1)
    for name in ("p", "p-again"):
        p = make_engine(name, GQA, producer=True, settings=settings)
        assert p.port == first
        d.wait_gauge("peers_ready", 2)
        before = dials(d)
        load = d.loaded(d.decode(p.prefill(tokens(9, len(name)))))
        assert load.ok, load.text
        assert dials(d) == before
        p.assert_clean()
        p.kill()
        d.wait_gauge("peers_ready", 1)
    d.assert_clean()


def test_an_incompatible_engine_is_no_reason_not_to_start(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True, fields={"dtype": "float16"})
    d = make_engine("d", GQA, producer=False, settings={"connect": [f"127.0.0.1:{p.port}"]})
    deadline = time.monotonic() + 30
    while p.figures()["counters"]["peers_rejected"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    load = d.loaded(d.decode(p.prefill(tokens(9))))
    assert load.fields == {"dtype"}
    p.ask("revoke")
    for engine in (p, d):
        engine.assert_clean()
