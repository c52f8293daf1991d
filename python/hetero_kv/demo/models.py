"""Tiny random models that real vLLM engines serve on a CPU.

Three kinds, each small enough to load in a moment and still exercise a cache layout that matters:

* ``gqa``: Llama with 8 query heads over 4 KV heads, so that TP 2 and 4 split its cache by head;
* ``mla``: DeepSeek V3 with the one latent size that vLLM's CPU kernel has (512 + 64). It names 4
  routed experts, which makes vLLM use its MoE data parallelism, while every layer is dense,
  because vLLM's CPU build has no kernel for DeepSeek's grouped experts;
* ``mla-dense``: the same with no experts, where vLLM runs data parallel ranks independently.

Weights are drawn from a seed and wide enough that greedy decoding wanders: a model whose argmax
never changes would give equal tokens for unequal caches, and a test on it could not fail.

Run it with the interpreter of a vLLM environment: ``python -m hetero_kv.demo.models gqa DIR``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

KINDS = ("gqa", "mla", "mla-dense")
DEFAULT_SEED = 20

VOCAB_SIZE = 512
CONTEXT_TOKENS_MAX = 2048
# Raised whenever a model written under the same kind and seed would differ from before, so that
# a folder left by an older version is written again.
RECIPE_VERSION = 1
STAMP_NAME = "hetero_kv_model.json"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")

# The tokenizer is trained on this text: enough ordinary English for merges that cover whole words.
CORPUS = (
    "A prefill engine reads the whole prompt at once and writes keys and values for every token.",
    "A decode engine writes one token after another and reads all keys and values at each step.",
    "Each head of the cache belongs to one rank, or to several ranks that hold equal copies.",
    "When the ranks on both sides differ in number, every head must still arrive exactly once.",
    "The quick brown fox jumps over the lazy dog while seven wizards mix a potion of quartz.",
    "Rivers run to the sea, and the sea gives its water back to the mountains as rain and snow.",
    "In the morning the harbour is quiet; by noon it is full of boats, voices, ropes and nets.",
    "She counted one, two, three, four, five, six, seven, eight, nine, ten and began again.",
)


def stamp(kind: str, seed: int) -> dict[str, Any]:
    """What identifies a written model; stored beside it and compared before it is reused."""
    return {"kind": kind, "seed": seed, "recipe_version": RECIPE_VERSION}


def is_written(folder: Path, kind: str, seed: int = DEFAULT_SEED) -> bool:
    """Whether `folder` holds this model in full; the stamp is the last file written."""
    try:
        found = json.loads((folder / STAMP_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == stamp(kind, seed))


def write_model(kind: str, folder: Path, seed: int = DEFAULT_SEED) -> Path:
    """Writes one model with its tokenizer to `folder` and returns it.

    A complete model of the same kind and seed is kept. The folder appears whole or not at all:
    two writers at once both end with a good one.

    Raises `ValueError` for an unknown kind, or for a folder that holds something else.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown model kind {kind!r}; known: {', '.join(KINDS)}")
    if is_written(folder, kind, seed):
        return folder
    if folder.exists() and not (folder / STAMP_NAME).exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} exists and is no model written by this program; left as it is")
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _save_weights(kind, building, seed)
        _save_tokenizer(building)
        (building / STAMP_NAME).write_text(json.dumps(stamp(kind, seed)), encoding="utf-8")
        # mkdtemp gives a folder that only its owner may enter.
        building.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        try:
            building.rename(folder)
        except OSError:
            # Another writer was first; its model is the same if its stamp says so.
            if not is_written(folder, kind, seed):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _save_weights(kind: str, folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = _gqa_config() if kind == "gqa" else _mla_config(kind == "mla")
    # One thread and one generator: the same seed gives the same bytes on any machine.
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    model.generation_config.do_sample = False
    model.save_pretrained(folder, safe_serialization=True)


def _gqa_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        # The smallest head size that vLLM's CPU attention has.
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS_MAX,
        initializer_range=0.3,
        tie_word_embeddings=False,
        dtype="float32",
        **_token_ids(),
    )


def _mla_config(routed_experts: bool) -> Any:
    from transformers import DeepseekV3Config

    layers = 3
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        # Every layer is dense, also when experts are named.
        first_k_dense_replace=layers,
        n_routed_experts=4 if routed_experts else 0,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        # vLLM's CPU MLA kernel exists for this pair only.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS_MAX,
        initializer_range=0.3,
        tie_word_embeddings=False,
        dtype="float32",
        **_token_ids(),
    )


def _token_ids() -> dict[str, Any]:
    ids = {name: index for index, name in enumerate(SPECIAL_TOKENS)}
    return {
        "bos_token_id": ids["<|bos|>"],
        "eos_token_id": ids["<|end|>"],
        "pad_token_id": ids["<|pad|>"],
    }


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    make_tokenizer: Any = PreTrainedTokenizerFast
    fast = make_tokenizer(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_TOKENS_MAX,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hetero_kv.demo.models", description="Writes one tiny random model."
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path, help="where to write it; made if it is missing")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    arguments = parser.parse_args(argv)
    try:
        folder = write_model(arguments.kind, arguments.folder, arguments.seed)
    except (OSError, ValueError, ImportError) as error:
        print(f"models: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
