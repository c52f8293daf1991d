"""Engines with keys (``control_key_file``): the same is served, another is refused by name.

A topology with keys is a line of the matrix; here a prefill engine meets a decode engine with its
key, one with another and one with none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import key_file
from .conftest import References
from .fault_site import GRACE_S, LEASE_S, SLACK_S, Site, failures, open_site, risen, spec
from .legs import completion, decode, prefill

pytestmark = [
    pytest.mark.engines,
    pytest.mark.vllm,
    pytest.mark.matrix,
    pytest.mark.timeout(900),
]

SETTLED_S = LEASE_S + GRACE_S + SLACK_S
REFUSED = ("pair_refused", "control_key_file")


@pytest.fixture(scope="module")
def site(references: References, engine_logs: Path) -> Iterator[Site]:
    reference = references.of("gqa")
    logs = engine_logs / "keys"
    own, other = (key_file(logs / name) for name in ("own.key", "other.key"))
    ours = {"control_key_file": str(own), "transport": "tcp"}
    specs = [
        spec("prefill", "prefill", reference, {**ours, "lease_s": LEASE_S}),
        spec("decode", "decode", reference, ours),
        spec("stranger", "decode", reference, {**ours, "control_key_file": str(other)}),
        spec("keyless", "decode", reference, {"transport": "tcp"}),
    ]
    with open_site(specs, reference, logs, ("prefill", "decode")) as running:
        yield running


def test_an_engine_with_another_key_or_none_is_refused_by_name(site: Site) -> None:
    prompt, expected = site.prompt(200)
    for name, words in (
        ("stranger", "decode's proof is by no key"),
        ("keyless", "this prefill engine has it set"),
    ):
        before = failures(site[name])
        body = completion(prompt, cache_salt=name)
        reply = decode(site[name], body, prefill(site["prefill"], body))
        assert reply.status == 500, reply.raw[:300]
        assert risen(site[name], before) == {REFUSED: 1.0}
        assert words in site.log(name)
        # P's log says so too, and neither has a key in it.
        assert "a consumer is refused: control_key_file" in site.log("prefill")
        site.require_nothing_held("prefill", name, within_s=SETTLED_S)
    for path in (site.logs / "own.key", site.logs / "other.key"):
        key = path.read_text(encoding="utf-8").strip()
        assert not [name for name in site.engines if key in site.log(name)]
    # Whom they were not is served as ever, and so is the one with the key.
    site.require_serving("stranger")
    before = failures(site["decode"])
    body = completion(prompt, cache_salt="own")
    reply = decode(site["decode"], body, prefill(site["prefill"], body))
    assert (reply.status, reply.tokens) == (200, [expected]), reply.raw[:300]
    assert failures(site["decode"]) == before
    assert site["decode"].metric("hetero_kv_bytes_read_total") > 0
    site.require_nothing_held(within_s=SETTLED_S)
