"""Fault injection: off unless asked for, each prompt once, the sign bit of every element."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetero_kv.fault import FlipSource, fault, fault_mark, flip


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_KV_FAULT", raising=False)
    assert fault() is None
    monkeypatch.setenv("HETERO_KV_FAULT", "")
    assert fault() is None
    monkeypatch.setenv("HETERO_KV_FAULT", "flip-source")
    assert fault() == "flip-source"
    monkeypatch.setenv("HETERO_KV_FAULT", "flip-sauce")
    with pytest.raises(ValueError, match="flip-sauce"):
        fault()


def test_flip_changes_the_blocks_and_nothing_else() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(1.0, 25.0).view(4, 1, 2, 3)
    before = tensor.clone()
    flip((tensor,), [1, 3])
    assert torch.equal(tensor[[1, 3]], -before[[1, 3]])
    assert torch.equal(tensor[[0, 2]], before[[0, 2]])


def step(scheduled: dict[str, int], computed: dict[str, int], new: set[str]) -> Any:
    """What of a scheduler output is looked at."""
    cached = [name for name in computed if name not in new]
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed[name]) for name in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached, num_computed_tokens=[computed[name] for name in cached]
        ),
    )


def test_a_prompt_is_flipped_once_in_the_step_that_completes_it() -> None:
    source = FlipSource()
    source.add(SimpleNamespace(request_id="a", num_prompt_tokens=20))
    manager = SimpleNamespace(get_block_ids=lambda name: ([4, 5],))
    assert source.blocks(step({"a": 16, "b": 9}, {"a": 0, "b": 0}, {"a", "b"}), manager) == []
    assert source.blocks(step({"a": 4}, {"a": 16}, set()), manager) == [4, 5]
    assert source.blocks(step({"a": 1}, {"a": 20}, set()), manager) == []


def test_an_aborted_prompt_is_forgotten() -> None:
    source = FlipSource()
    source.add(SimpleNamespace(request_id="a", num_prompt_tokens=20))
    source.discard("a")
    source.discard("never seen")
    assert source.blocks(step({"a": 20}, {"a": 0}, {"a"}), None) == []


def test_a_mark_limits_the_fault_to_some_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_KV_FAULT", "flip-source:control")
    assert (fault(), fault_mark()) == ("flip-source", "control")
    source = FlipSource(fault_mark())
    for name in ("cmpl-control-1", "cmpl-2"):
        source.add(SimpleNamespace(request_id=name, num_prompt_tokens=20))
    manager = SimpleNamespace(
        get_block_ids=lambda name: ([4], [5]) if "control" in name else ([6],)
    )
    both = {"cmpl-control-1": 20, "cmpl-2": 20}
    assert source.blocks(step(both, dict.fromkeys(both, 0), set(both)), manager) == [4, 5]


def test_a_mark_limits_the_fault_to_requests_that_carry_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HETERO_KV_FAULT", "flip-source")
    assert fault_mark() == ""
    monkeypatch.setenv("HETERO_KV_FAULT", "flip-source:control")
    assert fault() == "flip-source"
    assert fault_mark() == "control"
    source = FlipSource(fault_mark())
    for name in ("cmpl-control-001", "cmpl-pass-001"):
        source.add(SimpleNamespace(request_id=name, num_prompt_tokens=4))
    manager = SimpleNamespace(get_block_ids=lambda name: ([len(name)],))
    names = {"cmpl-control-001": 4, "cmpl-pass-001": 4}
    assert source.blocks(step(names, dict.fromkeys(names, 0), set(names)), manager) == [16]
