"""Random interleavings: whatever happens to requests, our reports never end an engine and every
block comes back. vLLM's assertions are the oracle, next to the tables at the end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract_engine import PROMPT, Engine, assert_nothing_held, drain, engines, run_until

pytestmark = pytest.mark.vllm

# What happens to one request of a run, in the order in which requests arrive.
FATES = (
    "plain",
    "load",
    "load twice",
    "abort prefill",
    "abort decode early",
    "abort decode late",
    "reject",
    "bad params",
    "foreign epoch",
    "wrong prompt",
    "never decoded",
)


class Run:
    """A pair of engines under one sequence of fates; every step is vLLM's own."""

    def __init__(self, p: Engine, d: Engine, seed: int) -> None:
        self.p, self.d = p, d
        self.random = random.Random(seed)
        self.count = 0

    def some_steps(self) -> None:
        for _ in range(self.random.randrange(4)):
            engine = self.random.choice((self.p, self.d))
            engine.step()
            assert 0 <= engine.free_blocks() <= engine.free_at_start

    def prompt(self) -> list[int]:
        length = self.random.choice((1, 15, 16, 17, 40, 100, 130))
        # Some prompts share a prefix, so that local hits happen on both sides.
        start = self.random.choice((0, 0, self.random.randrange(300)))
        return [5 + (start + index) % 490 for index in range(length)]

    def prefilled(self, name: str, prompt: list[int]) -> dict[str, Any]:
        self.p.add(name, prompt, {"do_remote_decode": True})
        run_until(lambda: name in self.p.answers, self.p, self.d)
        params = self.p.answers[name]
        assert params is not None
        return params

    def meet(self, fate: str) -> None:
        self.count += 1
        name = f"r{self.count}"
        prompt = self.prompt()
        if fate == "plain":
            self.d.add(name, prompt, max_tokens=3)
        elif fate == "abort prefill":
            self.p.add(name, PROMPT, {"do_remote_decode": True}, max_tokens=5)
            self.p.step()
            self.p.abort(name)
        else:
            params = self.prefilled(name, prompt)
            if fate == "bad params":
                params.pop(self.random.choice(("transfer_id", "remote_port", "prompt_digest")))
            elif fate == "foreign epoch":
                params["lease_epoch"] += 7
            if fate == "never decoded":
                return
            if fate == "reject":
                self.d.add(name, [0], params, abort_immediately=True)
                return
            tokens = [*prompt, 11] if fate == "wrong prompt" else prompt
            self.d.add(name, tokens, params, max_tokens=3)
            if fate == "load twice":
                self.d.add(f"{name}-again", tokens, params, max_tokens=3)
            elif fate == "abort decode early":
                self.d.abort(name)
            elif fate == "abort decode late":
                self.some_steps()
                self.d.abort(name)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("tp", [1, 2])
def test_any_interleaving_leaves_both_engines_alive_and_empty(
    config_folder: Path, tp: int, policy: str
) -> None:
    short = {"lease_s": 1, "claim_timeout_s": 5}
    specs = [
        (config_folder, "kv_producer", {"settings": short, "num_blocks": 256}),
        (config_folder, "kv_consumer", {"settings": short, "tp": tp, "policy": policy}),
    ]
    with engines(*specs) as (p, d):

        @settings(
            max_examples=20,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=8),
            seed=st.integers(0, 2**32),
        )
        def interleave(fates: list[str], seed: int) -> None:
            p.reports.clear()
            d.reports.clear()
            run = Run(p, d, seed)
            run.count = int(1e6 * len(p.answers))
            for fate in fates:
                run.meet(fate)
                run.some_steps()
            drain(p, d)
            assert_nothing_held(p, d)
            for engine in (p, d):
                for kind in ("finished_sending", "finished_recving"):
                    ids = [i for report in engine.reports for i in getattr(report, kind) or ()]
                    assert len(ids) == len(set(ids)), f"{kind} reported twice: {ids}"

        interleave()
