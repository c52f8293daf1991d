"""A prefill engine that is told to end (SIGTERM) while decode still needs what it holds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import matrix_report
from .conftest import References
from .fault_site import Site, open_site, spec
from .legs import completion, decode, prefill
from .processes import wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]

LEASE_S = 12.0
# vLLM's own: how long it goes on with what is under way once it is told to end.
SHUTDOWN_TIMEOUT_S = 60


@pytest.fixture(scope="module")
def site(references: References, engine_logs: Path) -> Iterator[Site]:
    reference = references.of("gqa")
    drains = ("--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S))
    settings = {"lease_s": LEASE_S}
    specs = [
        spec("serves", "prefill", reference, settings, flags=drains),
        spec("waits", "prefill", reference, settings, flags=drains),
        spec("decode", "decode", reference, {}),
    ]
    with open_site(specs, reference, engine_logs / "drain", ("serves", "decode")) as running:
        yield running


def test_what_is_held_is_served_before_the_engine_ends(site: Site) -> None:
    prompt, expected = site.prompt(200)
    body = completion(prompt, cache_salt="drain-served")
    params = prefill(site["serves"], body)
    told_s = time.monotonic()
    os.kill(site["serves"].process.pid, signal.SIGTERM)
    time.sleep(2.0)
    reply = decode(site["decode"], body, params)
    assert reply.status == 200, reply.raw[:500]
    assert reply.tokens == [expected]
    wait_until(lambda: site["serves"].process.poll() is not None, LEASE_S, "it has ended")
    matrix_report.measure("drained after a read", seconds=round(time.monotonic() - told_s, 1))


def test_what_nobody_reads_holds_up_the_end_no_longer_than_its_lease(site: Site) -> None:
    prompt, _ = site.prompt(200)
    body = completion(prompt, cache_salt="drain-unread")
    params = prefill(site["waits"], body)
    told_s = time.monotonic()
    os.kill(site["waits"].process.pid, signal.SIGTERM)
    wait_until(
        lambda: site["waits"].process.poll() is not None, LEASE_S + 15.0, "it has ended", 0.2
    )
    matrix_report.measure("drained unread", seconds=round(time.monotonic() - told_s, 1))
    reply = decode(site["decode"], body, params)
    assert reply.status == 500
    site.require_nothing_held("decode")
    site.require_serving("decode")
