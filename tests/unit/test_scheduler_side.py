"""``kv_transfer_params`` through the real hooks: nothing raises, the counter names the fault."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not installed")

import torch
from vllm.lora.request import LoRARequest

from contract_engine import PROMPT, Engine, assert_nothing_held, drain, engines, prefill, run_until
from hetero_kv import _core
from hetero_kv.scheduler import _ingredients

pytestmark = pytest.mark.vllm

KEYS = (
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
)
HUGE = "7" * 300_000


class Pair:
    """A prefill and a decode engine that live for all cases, and what the last case counted."""

    def __init__(self, p: Engine, d: Engine) -> None:
        self.p, self.d = p, d
        self.count = 0
        self.params = prefill(p, "template")
        self.seen = self.counted()

    def counted(self) -> dict[tuple[str, str], int]:
        side = self.d.connector._scheduler
        total = {(r, f): n for r, f, n in self.d.figures()["failures"]}
        for series, n in side._failures.items():
            total[series] = total.get(series, 0) + n
        return total

    def outcome(self, params: Any, prompt: list[int] | None = None) -> tuple[str, dict[Any, int]]:
        """How a decode request with these params ends, and the failures it adds."""
        self.count += 1
        name = f"d{self.count}"
        self.d.add(name, prompt or PROMPT, params)
        run_until(lambda: name in self.d.outcomes, self.d)
        # While a transfer lives its id belongs to the params it came with first.
        run_until(lambda: not self.d.figures()["gauges"]["transfers_open"], self.d)
        before, self.seen = self.seen, self.counted()
        added = {k: n - before.get(k, 0) for k, n in self.seen.items() if n != before.get(k, 0)}
        return self.d.outcomes[name], added


@pytest.fixture(scope="module")
def pair(config_folder: Path) -> Iterator[Pair]:
    settings = {"lease_s": 3600, "claim_timeout_s": 20, "sibling_linger_ms": 0}
    with engines(
        (config_folder, "kv_producer", {"settings": settings}),
        (config_folder, "kv_consumer", {"settings": settings}),
    ) as (p, d):
        made = Pair(p, d)
        yield made
        p.connector.reset_cache()
        drain(p, d)
        assert_nothing_held(p, d)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "change",
    [
        "missing",
        "null",
        "object",
        "list of texts",
        "huge",
        "negative",
        "nan",
        "control",
        "not json",
    ],
)
def test_each_key_in_each_wrong_form_is_counted_by_name(pair: Pair, key: str, change: str) -> None:
    params = dict(pair.params)
    if change == "missing":
        del params[key]
    else:
        params[key] = {
            "null": None,
            "object": {"a": 1},
            "list of texts": ["x", "y"],
            "huge": HUGE,
            "negative": -1,
            "nan": float("nan"),
            "control": "a\x00b",
            "not json": {1, 2},
        }[change]
    # What is no JSON has no keys.
    expected = "*" if change in ("nan", "not json") else key
    assert pair.outcome(params) == ("error", {("bad_params", expected): 1})


def test_numbers_as_texts_are_taken(pair: Pair) -> None:
    params = {
        k: str(v) if isinstance(v, int) and not isinstance(v, bool) else v
        for k, v in pair.params.items()
    }
    # The epoch is wrong on purpose, so that the template's lease is left for other cases.
    params["lease_epoch"] = str(int(params["lease_epoch"]) + 5)
    assert pair.outcome(params, PROMPT) == ("error", {("lease_gone", ""): 1})


@pytest.mark.parametrize("flag", ["do_remote_prefill", "do_remote_decode"])
@pytest.mark.parametrize("value", ["yes", 1, [True], {"a": 1}])
def test_flags_that_are_no_truth_values(pair: Pair, flag: str, value: Any) -> None:
    params = {**pair.params, flag: value}
    assert pair.outcome(params) == ("error", {("bad_params", flag): 1})


@pytest.mark.parametrize(
    ("key", "value", "reason", "field"),
    [
        ("remote_engine_id", "someone-else", "pair_refused", "remote_engine_id"),
        ("remote_incarnation", "0" * 16, "pair_refused", "remote_incarnation"),
        ("lease_epoch", 12345, "lease_gone", ""),
        ("transfer_id", "0" * 31 + "1", "lease_gone", ""),
        ("tp_size", 4, "bad_params", "tp_size"),
        ("hetero_version", 2, "bad_params", "hetero_version"),
        ("remote_port", 65_536, "bad_params", "remote_port"),
        ("remote_block_ids", [[2**32]], "bad_params", "remote_block_ids"),
    ],
)
def test_foreign_values(pair: Pair, key: str, value: Any, reason: str, field: str) -> None:
    outcome = pair.outcome({**pair.params, key: value})
    assert outcome == ("error", {(reason, field): 1})


def test_params_that_name_this_engine(pair: Pair) -> None:
    own = pair.d.config.kv_transfer_config.engine_id
    assert pair.outcome({**pair.params, "remote_engine_id": own}) == (
        "error",
        {("bad_params", "remote_engine_id"): 1},
    )


def test_params_over_the_size_limit(pair: Pair) -> None:
    params = {**pair.params, "padding": "x" * (17 << 20)}
    assert pair.outcome(params) == ("error", {("bad_params", "*"): 1})


def test_params_nested_without_end(pair: Pair) -> None:
    deep: list[Any] = []
    deep.append(deep)
    assert pair.outcome({**pair.params, "x": deep})[1] == {("bad_params", "*"): 1}
    nested: Any = 1
    for _ in range(100_000):
        nested = [nested]
    assert pair.outcome({**pair.params, "x": nested})[1] == {("bad_params", "*"): 1}


@pytest.mark.parametrize("params", [None, {}, {"unknown": 1}, {"do_remote_prefill": None}])
def test_ordinary_requests_are_left_alone(pair: Pair, params: Any) -> None:
    assert pair.outcome(params) == ("length", {})


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": "yes"},
        {"do_remote_decode": True, "transfer_id": "short"},
        {"do_remote_decode": True, "transfer_id": ["x"]},
    ],
)
def test_a_prefill_with_bad_params_is_answered_without_a_lease(pair: Pair, params: Any) -> None:
    pair.count += 1
    name = f"p{pair.count}"
    granted = pair.p.figures()["counters"]["leases_granted"]
    pair.p.add(name, PROMPT, params)
    run_until(lambda: name in pair.p.outcomes, pair.p)
    assert pair.p.answers[name] is None
    assert pair.p.figures()["counters"]["leases_granted"] == granted
    assert name not in pair.p.scheduler.requests


def test_a_second_owner_of_a_transfer_id_is_refused(pair: Pair) -> None:
    pair.p.add(
        "second",
        PROMPT,
        {
            "do_remote_decode": True,
            "transfer_id": pair.params["transfer_id"],
        },
    )
    run_until(lambda: "second" in pair.p.outcomes, pair.p)
    assert pair.p.answers["second"] is None
    assert pair.p.figures()["counters"]["offers_refused"] >= 1


def test_null_and_unknown_keys_are_ignored_by_prefill(pair: Pair) -> None:
    pair.p.add(
        "nulls",
        PROMPT,
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": None,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "something": {"else": 1},
        },
    )
    run_until(lambda: "nulls" in pair.p.outcomes, pair.p)
    assert set(KEYS) <= pair.p.answers["nulls"].keys()


# === the prompt's digest ===


def digest(token_ids: list[int], ingredients: list[tuple[str, bytes]]) -> str:
    """The definition, in Python."""
    sha = hashlib.sha256(b"hetero_kv prompt v1")
    sha.update(struct.pack("<Q", len(token_ids)))
    sha.update(struct.pack(f"<{len(token_ids)}I", *token_ids))
    for name, value in ingredients:
        for part in (name.encode(), value):
            sha.update(struct.pack("<Q", len(part)))
            sha.update(part)
    return sha.hexdigest()


@pytest.mark.parametrize(
    ("token_ids", "ingredients"),
    [([], []), ([1, 2, 3], []), (list(range(5000)), [("lora", b"a"), ("cache_salt", b"\x00")])],
)
def test_the_core_computes_the_digest_as_defined(
    token_ids: list[int], ingredients: list[tuple[str, bytes]]
) -> None:
    assert _core.prompt_digest(token_ids, ingredients) == digest(token_ids, ingredients)


def request(**changes: Any) -> Any:
    """A request as far as its digest goes."""
    fields = {
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "prompt_embeds": None,
        "prompt_is_token_ids": None,
    }
    return SimpleNamespace(**{**fields, **changes})


def feature(identifier: str, offset: int = 0, length: int = 4) -> Any:
    """One multimodal item."""
    place = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(identifier=identifier, mm_position=place)


def test_whatever_shapes_the_kv_changes_the_digest() -> None:
    lora = [LoRARequest(name, 1, "/nowhere") for name in ("a", "b")]
    cases = [
        request(),
        request(lora_request=lora[0]),
        request(lora_request=lora[1]),
        request(cache_salt="a"),
        request(cache_salt="b"),
        request(mm_features=[feature("x")]),
        request(mm_features=[feature("y")]),
        request(mm_features=[feature("x", offset=1)]),
        request(mm_features=[feature("x", length=5)]),
        request(mm_features=[feature("x"), feature("y")]),
        request(mm_features=[feature("y"), feature("x")]),
        request(prompt_embeds=torch.ones(2, 3)),
        request(prompt_embeds=torch.zeros(2, 3)),
        request(prompt_embeds=torch.ones(2, 3, dtype=torch.bfloat16)),
        request(prompt_embeds=torch.ones(2, 3), prompt_is_token_ids=[True, False]),
        request(prompt_embeds=torch.ones(2, 3), prompt_is_token_ids=[False, True]),
    ]
    digests = [_core.prompt_digest([1, 2, 3], _ingredients(case)) for case in cases]
    assert len(set(digests)) == len(cases)


def test_a_loras_place_on_disk_does_not_change_the_digest() -> None:
    here, there = LoRARequest("a", 1, "/here"), LoRARequest("a", 7, "/there")
    assert _ingredients(request(lora_request=here)) == _ingredients(request(lora_request=there))


@pytest.mark.parametrize("salt", ["other", None])
def test_another_salt_is_another_prompt(config_folder: Path, salt: str | None) -> None:
    with engines((config_folder, "kv_producer", {}), (config_folder, "kv_consumer", {})) as (p, d):
        p.add("p0", PROMPT, {"do_remote_decode": True}, cache_salt="salt")
        run_until(lambda: "p0" in p.outcomes, p)
        d.add("d0", PROMPT, p.answers["p0"], cache_salt=salt)
        drain(p, d)
        assert d.scheduled["d0"] == [100]
        assert d.figures()["counters"]["digest_mismatches"] == 1
        assert_nothing_held(p, d)
