"""Copies of KV heads, and an index-by-index judge of them.

What a rank holds is asked of vLLM's own weight loader (``QKVParallelLinear``), not of a formula.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import QKVParallelLinear

EXECUTABLE = Path(sys.executable).with_name("hetero-kv")
TP_SIZES = (1, 2, 3, 4, 6, 8, 16)
HEADS_MAX = 64


class Pair(NamedTuple):
    """A prefill and a decode engine of one model."""

    prefill_tp: int
    decode_tp: int
    heads: int
    """KV heads in all; 0 for MLA."""


class Copy(NamedTuple):
    """One head, from its place on a prefill rank to its place on a decode rank."""

    prefill_rank: int
    prefill_index: int
    decode_index: int


Copies = dict[int, list[Copy]]
"""By decode rank."""


class Plan(NamedTuple):
    """What ``hetero-kv plan`` says, by decode rank."""

    copies: Copies
    holders: dict[int, set[int]]
    release: dict[int, set[int]]


@functools.cache
def _config() -> VllmConfig:
    return VllmConfig()


@functools.cache
def held(heads: int, tp_size: int, rank: int) -> tuple[int, ...]:
    """The KV heads that vLLM loads on a rank, in their order in its cache; (0,) for MLA's latent.

    Raises ``AssertionError``, as vLLM does when a model is loaded, for heads it cannot share out.
    """
    if heads == 0:
        return (0,)
    group = SimpleNamespace(rank_in_group=rank, world_size=tp_size)
    with set_current_vllm_config(_config()), mock.patch.object(parallel_state, "_TP", group):
        layer = QKVParallelLinear(
            1, 1, math.lcm(heads, tp_size), heads, bias=False, params_dtype=torch.float32
        )
        weights = torch.arange(heads, dtype=torch.float32).view(heads, 1)
        layer.weight_loader(layer.weight, weights, "k")
    keys = layer.weight.data[layer.num_heads : layer.num_heads + layer.num_kv_heads, 0]
    return tuple(int(key) for key in keys)


def loads(heads: int, tp_size: int) -> bool:
    """Whether vLLM can load a model of so many KV heads on so many ranks at all."""
    try:
        held(heads, tp_size, 0)
    except AssertionError:
        return False
    return True


def divides(prefill_tp: int, decode_tp: int) -> bool:
    return prefill_tp % decode_tp == 0 or decode_tp % prefill_tp == 0


def pairs(heads: Iterable[int] = range(HEADS_MAX + 1)) -> Iterator[Pair]:
    """All pairs of ``TP_SIZES`` whose engines vLLM can start and of which one divides the other."""
    for number in heads:
        sizes = [size for size in TP_SIZES if loads(number, size)]
        for prefill_tp in sizes:
            for decode_tp in sizes:
                if divides(prefill_tp, decode_tp):
                    yield Pair(prefill_tp, decode_tp, number)


def judge(pair: Pair, copies: Copies) -> Iterator[str]:
    """Every head of every decode rank must be written once, with that same head."""
    for rank in range(pair.decode_tp):
        wanted = held(pair.heads, pair.decode_tp, rank)
        written: list[int] = []
        for copy in copies.get(rank, []):
            where = f"{pair}: decode rank {rank}: {copy}"
            if not 0 <= copy.prefill_rank < pair.prefill_tp:
                yield f"{where}: no such prefill rank"
                continue
            source = held(pair.heads, pair.prefill_tp, copy.prefill_rank)
            if not 0 <= copy.prefill_index < len(source):
                yield f"{where}: outside of the {len(source)} heads of its block"
            elif not 0 <= copy.decode_index < len(wanted):
                yield f"{where}: outside of the {len(wanted)} heads of decode's block"
            elif source[copy.prefill_index] != wanted[copy.decode_index]:
                yield f"{where}: head {source[copy.prefill_index]} in the place of another"
            written.append(copy.decode_index)
        if sorted(written) != list(range(len(wanted))):
            yield f"{pair}: decode rank {rank}: places written {sorted(written)} of {len(wanted)}"


def kv_flag(heads: int) -> str:
    return f"gqa:{heads}:64" if heads else "mla:576"


def run_plan(prefill: str, decode: str, heads: int, *more: str) -> Any:
    """``hetero-kv plan --json``, or the text of its refusal."""
    done = subprocess.run(
        [
            *(str(EXECUTABLE), "plan", "--json", "--kv", kv_flag(heads)),
            *("--prefill", prefill, "--decode", decode, *more),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        assert done.returncode == 2, done.stderr
        return done.stderr
    return json.loads(done.stdout)["ranks"]


def plan(pair: Pair) -> Plan:
    """Our plan of one transfer, as copies."""
    ranks = run_plan(f"dp=1,tp={pair.prefill_tp}", f"dp=1,tp={pair.decode_tp}", pair.heads)
    assert isinstance(ranks, list), ranks
    return as_plan(pair, ranks)


def as_plan(pair: Pair, ranks: list[dict[str, Any]]) -> Plan:
    """Rows of one decode engine, as copies; a head that its source does not hold is an error."""
    found = Plan({}, {}, {})
    for row in ranks:
        wanted = held(pair.heads, pair.decode_tp, row["tp"])
        found.copies[row["tp"]] = [
            Copy(
                source["tp"],
                held(pair.heads, pair.prefill_tp, source["tp"]).index(head),
                wanted.index(head),
            )
            for source in row["sources"]
            for head in range(*source["heads"])
        ]
        found.holders[row["tp"]] = {tp for _, tp in row["holders"]}
        found.release[row["tp"]] = {tp for _, tp in row["release"]}
    return found


@functools.cache
def all_plans() -> dict[Pair, Plan]:
    """Our plan of every pair, made once by the installed executable."""
    return {pair: plan(pair) for pair in pairs()}
