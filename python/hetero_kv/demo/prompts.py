"""Prompts of exact lengths, as token ids, so that block edges are hit on purpose."""

from __future__ import annotations

import dataclasses
import random

# Low ids are commonly special tokens; the demo's own tokenizer has six.
FIRST_ORDINARY_TOKEN = 16


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt and how it is asked for."""

    index: int
    token_ids: tuple[int, ...]
    stream: bool

    def __len__(self) -> int:
        return len(self.token_ids)


def lengths(count: int, block_tokens: int, tokens_max: int) -> list[int]:
    """`count` prompt lengths of 1 to `tokens_max`: around the edges of a block, then spread out.

    A prompt of one token moves no KV (its only token is computed on the decode side), and one
    of a block and one token moves exactly one block: the cases where an off-by-one shows.
    """
    edges = [1, 2, block_tokens - 1, block_tokens, block_tokens + 1, block_tokens * 5 // 2]
    wanted = [n for n in dict.fromkeys([*edges, tokens_max]) if 1 <= n <= tokens_max][:count]
    spread = max(1, count - len(wanted))
    for step in range(count - len(wanted)):
        wanted.append(3 + (tokens_max - 3) * step // spread if tokens_max > 3 else tokens_max)
    return wanted


def make_prompts(
    count: int, block_tokens: int, tokens_max: int, vocab_size: int, seed: int
) -> list[Prompt]:
    """Distinct random prompts, every second one to be streamed. The same seed gives the same.

    Raises `ValueError` when the vocabulary or a size is too small.
    """
    if count < 1 or tokens_max < 1 or block_tokens < 1:
        raise ValueError("count, tokens_max and block_tokens must be at least 1")
    if vocab_size < FIRST_ORDINARY_TOKEN + count:
        raise ValueError(f"a vocabulary of {vocab_size} is too small for {count} prompts")
    draw = random.Random(seed)
    # Distinct first tokens: no two prompts share a prefix, so no cache hit hides a transfer.
    firsts = draw.sample(range(FIRST_ORDINARY_TOKEN, vocab_size), count)
    prompts = []
    for index, (first, size) in enumerate(
        zip(firsts, lengths(count, block_tokens, tokens_max), strict=True)
    ):
        rest = (draw.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(size - 1))
        prompts.append(Prompt(index, (first, *rest), stream=index % 2 == 1))
    return prompts
