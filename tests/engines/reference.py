"""What one plain engine answers: the tokens that every topology has to give.

One plain engine per model, started once in a session, asked everything and stopped before the
topologies start: memory is for those.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hetero_kv.demo import run as demo
from hetero_kv.demo.client import complete_all
from hetero_kv.demo.engines import Engine, EngineSpec, running
from hetero_kv.demo.prompts import Prompt, make_prompts
from hetero_kv.demo.witness import ModelShape, block_tokens

PROMPTS = 16
PROMPT_TOKENS_MAX = 700
# Below what the decode engine of the faults takes, which refuses longer ones on purpose.
FAULT_PROMPT_TOKENS_MAX = 300


@dataclasses.dataclass(frozen=True)
class Reference:
    """Prompts of one model with the plain engine's tokens for each."""

    model: Path
    shape: ModelShape
    block_tokens: int
    prompts: list[Prompt]
    expected: list[tuple[int, ...]]
    fault_prompts: list[Prompt]
    fault_expected: list[tuple[int, ...]]


def ask_plain_engine(kind: str, logs: Path) -> Reference:
    """Starts the plain engine of one model, asks it twice for each prompt, and stops it."""
    demo.prepare_model(kind)
    model = demo.model_folder(kind)
    shape = ModelShape.read(model)
    with running([EngineSpec(f"plain-{kind}", model)], logs) as (plain,):
        tokens = block_tokens(plain)
        prompts = make_prompts(
            PROMPTS, tokens, PROMPT_TOKENS_MAX, shape.vocab_size, demo.PROMPT_SEED
        )
        fault_prompts = make_prompts(
            PROMPTS, tokens, FAULT_PROMPT_TOKENS_MAX, shape.vocab_size, demo.PROMPT_SEED + 1
        )
        return Reference(
            model,
            shape,
            tokens,
            prompts,
            _answers(plain, prompts, "plain"),
            fault_prompts,
            _answers(plain, fault_prompts, "plain-faults"),
        )


def _answers(plain: Engine, prompts: list[Prompt], name: str) -> list[tuple[int, ...]]:
    """Asked once all together and once more: unequal tokens elsewhere are then no accident."""
    first = demo.reference(plain, prompts)
    again = complete_all(
        plain.port, prompts, demo.COMPLETION_TOKENS, f"{name}-again", demo.REQUEST_TIMEOUT_S
    )
    for prompt, one, two in zip(prompts, first, again, strict=True):
        assert two.error == ""
        assert one == two.token_ids, f"the plain engine disagrees with itself on {prompt.index}"
    return first
