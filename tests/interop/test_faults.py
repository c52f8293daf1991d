"""Processes that die, stop or come too late: every request is reported once, by name, in time, and
bytes that are not the prompt's are never accepted."""

from __future__ import annotations

import time

import pytest

from .caches import Model, Moved, Style
from .conftest import MakeEngine
from .harness import PATIENCE_S, Engine, Load, tokens
from .ports import free_range

GQA = Model(kv_heads=4)
TCP = {"transport": "tcp"}
PEER_LOST_S = 2.0


def test_killed_prefill_scheduler(make_engine: MakeEngine) -> None:
    """Loads in every phase fail within two seconds, each once."""
    p = make_engine("p", GQA, 1, producer=True, settings=TCP)
    d = make_engine("d", GQA, 2, producer=False, settings=TCP)
    waiting, reading, asking = (p.prefill(tokens(9, salt)) for salt in range(3))
    assert d.loaded(d.decode(p.prefill(tokens(5, 9)))).ok
    requests = [d.decode(waiting, hold=True)]
    # No data comes for one that reads, and no answer for one that asks.
    with p.stopped(0):
        requests.append(d.decode(reading))
        for tp_rank in range(2):
            d.wait_reading(tp_rank)
        with p.stopped(scheduler=True):
            requests.append(d.decode(asking))
            d.wait_state(requests[-1], "loading")
            killed = time.monotonic()
            p.scheduler.kill()
            d.ask("let_go", requests[0].request_id)
            loads = [d.loaded(request) for request in requests]
    for load in loads:
        assert load.reasons == {"peer_lost"}, load
        assert len(load.reports) == 2
        assert load.at - killed < PEER_LOST_S
        assert "127.0.0.1" in load.text
    again = d.loaded(d.decode(waiting))
    assert again.reasons <= {"peer_lost", "unreachable"}
    d.assert_clean()
    d.check_bytes()


def test_killed_prefill_rank_while_it_is_read(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, 2, producer=True, settings=TCP)
    d = make_engine("d", GQA, 1, producer=False, settings=TCP)
    assert d.loaded(d.decode(p.prefill(tokens(5)))).ok
    prefill = p.prefill(tokens(9, 1))
    with p.stopped(1):
        request = d.decode(prefill)
        d.wait_reading(0)
        killed = time.monotonic()
        p.ranks[1].kill()
        load = d.loaded(request)
    assert load.reasons == {"peer_lost"}
    assert load.at - killed < PEER_LOST_S
    d.assert_clean()
    d.check_bytes()


def test_killed_prefill_rank_before_it_is_read(make_engine: MakeEngine) -> None:
    """Read straight from memory, a dead rank is known by its process."""
    settings = {"transport": "process"}
    p = make_engine("p", GQA, 2, producer=True, settings=settings)
    d = make_engine("d", GQA, 1, producer=False, settings=settings)
    assert d.loaded(d.decode(p.prefill(tokens(5)))).ok
    prefill = p.prefill(tokens(9, 1))
    p.ask("pause", True)
    request = d.decode(prefill, hold=True)
    p.ranks[1].kill()
    p.ranks[1].join(PATIENCE_S)
    d.ask("let_go", request.request_id)
    load = d.loaded(request)
    assert load.reasons == {"peer_lost"}, load
    d.assert_clean()
    d.check_bytes()


@pytest.mark.parametrize("transport", ["process", "tcp"])
def test_a_source_that_was_lost_is_avoided_where_another_has_its_heads(
    make_engine: MakeEngine, transport: str
) -> None:
    """Two holders of one head, of which one dies: loads that chose it fail until the first of them
    has said so; those after it read the other."""
    settings = {"transport": transport}
    p = make_engine("p", Model(kv_heads=1), 2, producer=True, settings=settings)
    d = make_engine("d", Model(kv_heads=1), 1, producer=False, settings=settings)
    prefills = [p.prefill(tokens(9, salt)) for salt in range(16)]
    # Without its rank the engine can take no step.
    p.ask("pause", True)
    p.ranks[1].kill()
    p.ranks[1].join(PATIENCE_S)
    loads = [d.loaded(d.decode(prefill)) for prefill in prefills]
    lost = [index for index, load in enumerate(loads) if not load.ok]
    assert len(lost) == 1, [load.text for load in loads]
    assert loads[lost[0]].reasons <= {"peer_lost", "unreachable"}
    assert d.figures()["counters"]["quarantines"] == 1
    assert d.gauge("sources_avoided") == 1
    # It is tried again when its time is over.
    d.wait_gauge("sources_avoided", 0)
    d.check_bytes()


def test_lease_that_ran_out_before_the_claim(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True, settings={"lease_s": 0.5})
    d = make_engine("d", GQA, producer=False)
    prefill = p.prefill(tokens(30))
    p.wait_event("released", prefill.request_id)
    refilled = p.prefill(tokens(30, 1))
    assert set(refilled.blocks) == set(prefill.blocks)
    late = d.decode(prefill)
    load = d.loaded(late)
    assert load.reasons == {"lease_gone"}
    assert load.bytes_read == 0
    assert d.figures()["counters"]["claims_gone"] == 1
    assert p.figures()["counters"]["leases_expired"] >= 1
    d.check_bytes()
    d.assert_clean()
    p.assert_clean()


@pytest.mark.parametrize("transport", ["process", "tcp"])
def test_refilled_blocks_are_never_accepted(make_engine: MakeEngine, transport: str) -> None:
    """A rank that gets its order late reads blocks that hold another prompt by then: whatever it
    got, the load fails."""
    # Long enough that a rank which is slow to get the processor back meets the fence and not its
    # own deadline, which starts when the order reaches it.
    settings = {"transport": transport, "lease_s": 6}
    p = make_engine("p", GQA, producer=True, settings=settings)
    d = make_engine("d", GQA, producer=False, settings=settings)
    prefill = p.prefill(tokens(30))
    late = d.decode(prefill, hold=True)
    # A sibling that is loaded proves that the lease is claimed, and warms the connection.
    assert d.loaded(d.decode(prefill)).ok
    # Between two steps, or the engine would wait for its rank.
    d.ask("pause", True)
    with d.stopped(0):
        d.ask("let_go", late.request_id)
        d.ask("pause", False)
        # The lease is claimed, so the step that begins the load has its order too. It is on its way
        # to the rank; nobody renews from here on.
        d.wait_event("ordered", late.request_id)
        with d.stopped(scheduler=True):
            p.wait_event("released", prefill.request_id)
            refilled = p.prefill(tokens(30, 1))
            assert set(refilled.blocks) == set(prefill.blocks)
            # The rank works again, and its scheduler does not.
            d.resume_rank(0)
            d.wait_idle(0)
    load = d.loaded(late)
    assert not load.ok
    assert load.reasons == {"fenced"}, load.reports
    d.assert_clean()
    p.assert_clean()
    d.check_bytes()


def test_restart_on_the_same_control_port(make_engine: MakeEngine) -> None:
    first, last = free_range(3)
    settings = {**TCP, "port_range": f"{first}-{last}"}
    d = make_engine("d", GQA, 2, producer=False)
    old = make_engine("p", GQA, producer=True, settings=settings)
    stale = old.prefill(tokens(9))
    assert d.loaded(d.decode(old.prefill(tokens(9, 1)))).ok
    port = old.port
    with old.stopped(0):
        reading = d.decode(stale)
        d.wait_reading(0)
        old.kill()
    assert d.loaded(reading).reasons == {"peer_lost"}
    new = make_engine("p", GQA, producer=True, settings=settings, seed=77)
    assert new.port == port
    fresh = new.prefill(tokens(9, 2))
    assert fresh.params is not None
    assert stale.params is not None
    assert fresh.params["remote_incarnation"] != stale.params["remote_incarnation"]
    load = d.loaded(d.decode(fresh))
    assert load.ok, load.text
    # Refused by the new start, or not asked again so soon after the old one was lost.
    assert d.loaded(d.decode(stale)).reasons <= {"pair_refused", "peer_lost", "unreachable"}
    _wait_refused(d, stale, "remote_incarnation")
    load = d.loaded(d.decode(new.prefill(tokens(17, 3))))
    assert load.ok, load.text
    d.check_bytes()
    for engine in (new, d):
        engine.assert_clean()


def _wait_refused(d: Engine, prefill: object, field: str) -> Load:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        load = d.loaded(d.decode(prefill))  # type: ignore[arg-type]
        if load.reasons == {"pair_refused"}:
            assert load.fields == {field}
            return load
        assert time.monotonic() < deadline, load
        time.sleep(0.1)


def test_abort_in_each_phase(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, 2, producer=True, settings=TCP)
    d = make_engine("d", GQA, 1, producer=False, settings=TCP)
    assert d.loaded(d.decode(p.prefill(tokens(5)))).ok

    # Before it has blocks.
    queued = p.prefill(tokens(9, 1))
    request = d.decode(queued, hold=True)
    assert d.ask("abort", request.request_id) == "waiting"
    p.wait_event("released", queued.request_id)

    # Rejected before the engine knows it.
    rejected = p.prefill(tokens(9, 2))
    d.ask("rejected", rejected.params)
    p.wait_event("released", rejected.request_id)

    # With blocks, while the claim is not answered.
    asked = p.prefill(tokens(9, 3))
    with p.stopped(scheduler=True):
        request = d.decode(asked)
        d.wait_state(request, "loading")
        assert d.ask("abort", request.request_id) == "loading"
        load = d.loaded(request)
        assert load.aborted
        assert load.reasons == {"cancelled"}
    p.wait_event("released", asked.request_id)

    # While it is read.
    read = p.prefill(tokens(30, 4))
    with p.stopped(0):
        request = d.decode(read)
        d.wait_reading(0)
        assert d.ask("abort", request.request_id) == "loading"
        load = d.loaded(request)
        assert load.aborted
        assert load.reasons == {"cancelled"}
        # Reported means that nothing writes these blocks any more, whatever the source does.
        d.rank_ask(0, "scribble", load.dest)
        for image in d.images:
            image.copy(Moved(d.model, 999, 999, load.dest, 0, 0), load.dest)
    p.wait_event("released", read.request_id)
    time.sleep(0.3)
    d.check_bytes()

    # When it runs.
    done = p.prefill(tokens(9, 5))
    request = d.decode(done)
    assert d.loaded(request).ok
    p.wait_event("released", done.request_id)
    d.wait_event("finished", request.request_id)
    assert d.ask("abort", request.request_id) == "unknown"

    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()
    assert p.figures()["counters"]["leases_expired"] == 0


def test_lease_is_renewed_while_a_request_waits(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True, settings={"lease_s": 1.5})
    d = make_engine("d", GQA, producer=False)
    prefill = p.prefill(tokens(9))
    request = d.decode(prefill, hold=True)
    time.sleep(4.0)
    d.ask("let_go", request.request_id)
    load = d.loaded(request)
    assert load.ok, load.text
    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()


def test_siblings_share_one_transfer(make_engine: MakeEngine) -> None:
    """`n > 1` on decode: the same params several times, one release after the last."""
    p = make_engine("p", GQA, 2, producer=True)
    d = make_engine("d", GQA, 1, producer=False)
    prefill = p.prefill(tokens(14))
    held = d.decode(prefill, hold=True)
    for load in [d.loaded(request) for request in [d.decode(prefill) for _ in range(3)]]:
        assert load.ok, load.text
    assert p.gauge("leases_alive") == 1
    d.ask("let_go", held.request_id)
    assert d.loaded(held).ok
    p.wait_event("released", prefill.request_id)
    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()
    assert p.figures()["counters"]["leases_read_out"] == 1


def test_full_producer_goes_on_after_releases(make_engine: MakeEngine) -> None:
    """Blocks of leased prompts are what the next prompts wait for."""
    style = Style(num_blocks=8)
    p = make_engine("p", GQA, producer=True, style=style)
    d = make_engine("d", GQA, producer=False)
    started = [p.start_prefill(tokens(16, salt)) for salt in range(6)]
    for one in started:
        load = d.loaded(d.decode(p.finish_prefill(*one)))
        assert load.ok, load.text
    d.check_bytes()
    for engine in (p, d):
        engine.assert_clean()


def test_revoked_leases_are_gone(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True)
    d = make_engine("d", GQA, producer=False)
    prefill = p.prefill(tokens(9))
    p.ask("revoke")
    p.wait_event("released", prefill.request_id)
    assert d.loaded(d.decode(prefill)).reasons == {"lease_gone"}
    for engine in (p, d):
        engine.assert_clean()


def test_orderly_end_is_told_at_once(make_engine: MakeEngine) -> None:
    p = make_engine("p", GQA, producer=True)
    d = make_engine("d", GQA, producer=False)
    assert d.loaded(d.decode(p.prefill(tokens(9)))).ok
    request = d.decode(p.prefill(tokens(9, 1)), hold=True)
    p.stop()
    d.ask("let_go", request.request_id)
    load = d.loaded(request)
    assert load.reasons == {"peer_lost"}
    assert "going down" in load.text
    d.assert_clean()
