"""vLLM's own block offsets (MoRIIO's, which are its most explicit) against our strides.

Both are turned into bytes: which byte of which block, on both sides. Where they differ, the content
of the tensors decides.
"""

from __future__ import annotations

import ctypes
import itertools
import json
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_layout import (
    compute_block_transfer_offsets,
    merge_contiguous_offsets,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from hetero_kv.layout import TOKEN_PAGES, LayoutError, has_token_pages, read_cache

LAYER = "model.layers.0.self_attn.attn"
DTYPE = torch.bfloat16
LOCAL, REMOTE = [1, 3], [4, 5]
REMOTE_BLOCKS = 16


def grouped(heads: int, tokens: int, size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=heads, head_size=size, dtype=DTYPE)


def latent(tokens: int, size: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=size, dtype=DTYPE)


def tensor(shape: tuple[int, ...], order: tuple[int, ...], pad: int = 0) -> torch.Tensor:
    """A cache whose elements lie in ``order`` (outermost first), with ``pad`` unused elements after
    each step of the outermost axis, and each of whose elements has a number of its own."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        if axis == order[0]:
            step += pad
        strides[axis] = step
        step *= shape[axis]
    cache = torch.zeros(step, dtype=torch.int16).as_strided(shape, strides)
    numbers = torch.arange(cache.numel(), dtype=torch.int16).reshape(shape)
    cache.copy_(numbers)
    return cache.view(DTYPE)


def ours(cache: torch.Tensor, block: int) -> list[int]:
    """Bytes of a block, head by head and token by token, from the strides that we announce."""
    described = json.loads(read_cache({LAYER: cache}, cache.shape[0], False).json)
    (part,) = described["layers"][0]["parts"]
    return [
        part["offset_bytes"]
        + block * part["block_stride_bytes"]
        + head * part["head_stride_bytes"]
        + row * part["row_stride_bytes"]
        + byte
        for head in range(described["heads_held"])
        for row in range(part["rows"])
        for byte in range(part["row_bytes"])
    ]


def vllms(
    cache: torch.Tensor, spec: Any, local: list[int], remote: list[int]
) -> list[tuple[int, int, int]]:
    """Runs (local, remote, bytes) between two caches of one layout."""
    runs = compute_block_transfer_offsets(
        LAYER, cache, {LAYER: spec}, local, remote, max(cache.shape[0], REMOTE_BLOCKS)
    )
    return list(zip(*runs, strict=True))


def pairs_of(runs: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
    return {(a + byte, b + byte) for a, b, size in runs for byte in range(size)}


CASES = {
    "latent": ((16, 1, 4, 3), latent(4, 3), (0, 1, 2, 3)),
    "head-major": ((16, 4, 4, 6), grouped(4, 4, 3), (0, 1, 2, 3)),
    "token-major": ((16, 4, 4, 6), grouped(4, 4, 3), (0, 2, 1, 3)),
}


@pytest.mark.parametrize("pad", [0, 5])
@pytest.mark.parametrize("case", CASES)
def test_our_strides_name_the_bytes_that_vllms_offsets_name(case: str, pad: int) -> None:
    shape, spec, order = CASES[case]
    cache = tensor(shape, order, pad)
    theirs = pairs_of(vllms(cache, spec, LOCAL, REMOTE))
    mine = {
        pair
        for local, remote in zip(LOCAL, REMOTE, strict=True)
        for pair in zip(ours(cache, local), ours(cache, remote), strict=True)
    }
    assert theirs == mine
    assert len(mine) == 2 * cache[0].numel() * 2


def test_the_golden_offsets_of_a_latent_cache() -> None:
    cache = tensor((8, 1, 4, 3), (0, 1, 2, 3))
    assert vllms(cache, latent(4, 3), LOCAL, REMOTE) == [(24, 96, 24), (72, 120, 24)]
    assert [ours(cache, block)[0] for block in (*LOCAL, *REMOTE)] == [24, 72, 96, 120]
    assert len(ours(cache, 1)) == 24


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_each_memory_layout_of_vllms(layout: KVCacheLayout) -> None:
    """Our strides find every block in each of vLLM's memory layouts. MoRIIO's offsets take one
    piece of a block's length, which is the block only where heads do not lie outside of blocks
    (``is_block_compact``); in the others it is head 0 of other blocks."""
    layers, shape, spec = 2, (16, 4, 4, 6), grouped(4, 4, 3)
    whole = tensor((layers, *shape), layout.stride_order)
    for layer in range(layers):
        cache = whole[layer]
        raw = bytes(cache.untyped_storage())
        begin = cache.storage_offset() * cache.element_size()
        for block in (0, 1, 15):
            wanted = cache[block].contiguous().view(torch.int16).flatten().tolist()
            assert numbers(raw, ours(cache, block)) == wanted
            ((first, _, size),) = vllms(cache, spec, [block], [block])
            theirs = numbers(raw, [begin + first + byte for byte in range(size)])
            assert (sorted(theirs) == sorted(wanted)) == layout.is_block_compact


def numbers(raw: bytes, offsets: list[int]) -> list[int]:
    """What lies at these bytes; what would lie behind the memory's end is left out."""
    data = bytes(raw[offset] for offset in offsets if offset < len(raw))
    return torch.frombuffer(bytearray(data), dtype=torch.int16).tolist()


def test_separate_keys_and_values_are_refused_and_not_misread() -> None:
    """0.32 registers one ``[B, H, N, C]`` view a layer (RFC #42082), so the five-axis caches of
    older versions, which MoRIIO still reads, do not come; if one does the engine does not start."""
    for shape in ((2, 8, 4, 2, 3), (8, 2, 4, 2, 3)):
        with pytest.raises(LayoutError, match=r"of shape .* is not supported"):
            read_cache({LAYER: torch.zeros(shape, dtype=DTYPE)}, 8, False)


def test_blocks_of_the_kernel_are_refused_by_both_where_counts_differ() -> None:
    cache = torch.zeros((16, 4, 2, 6), dtype=DTYPE)
    with pytest.raises(LayoutError, match="16 blocks in memory, 8 in the block table"):
        read_cache({LAYER: cache}, 8, False)
    with pytest.raises(ValueError, match="Unsupported MoRIIO K/V cache shape"):
        vllms(cache, grouped(4, 4, 3), [0], [0])


def test_block_lists_are_checked_by_both_against_each_sides_own_count() -> None:
    """Ours are checked in the core: `what_the_params_promise_beyond_the_holders_tokens_is_not_read`
    and `caches_that_do_not_fit_are_named`; here vLLM's rule, which ours must not be laxer than."""
    shape, spec, order = CASES["latent"]
    cache = tensor(shape, order)
    with pytest.raises(ValueError, match="local_block_ids longer than remote_block_ids"):
        vllms(cache, spec, [1, 2], [1])
    with pytest.raises(ValueError, match="local block id 16 is outside"):
        vllms(cache, spec, [16], [1])
    with pytest.raises(ValueError, match="remote block id 16 is outside"):
        vllms(cache, spec, [1], [16])
    assert vllms(cache, spec, [1], [4, 5]) == vllms(cache, spec, [1], [4])


def test_merging_keeps_the_bytes_and_needs_both_sides_to_follow() -> None:
    """What the core's runs do too (`runs_that_follow_on_both_sides_are_merged_and_no_others`)."""
    for local in itertools.permutations([0, 8, 16]):
        for remote in itertools.permutations([0, 8, 16]):
            merged = merge_contiguous_offsets(list(local), list(remote), [8] * 3)
            runs = list(zip(*merged, strict=True))
            pairs = dict(zip(local, remote, strict=True))
            assert pairs_of(runs) == pairs_of([(a, b, 8) for a, b in pairs.items()])
            follow = sum(pairs[a + 8] - pairs[a] == 8 for a in (0, 8))
            assert len(runs) == 3 - follow


@pytest.mark.parametrize("size", [16, 32, 64])
def test_cpu_mlas_own_writer_puts_a_token_where_we_would_cut(size: int) -> None:
    """What makes its blocks fit for other sizes of block: vLLM's cache writer, asked for each token
    of a scattered block table."""
    assert has_token_pages({CPUMLABackend.get_name()})
    rank, rope, tokens, blocks = 512, 64, 100, [5, 2, 7, 0, 3, 6, 1]
    cache = torch.full((8, size, rank + rope), -1.0)
    content = torch.arange(tokens * (rank + rope), dtype=torch.float32).view(tokens, -1)
    slots = torch.tensor([blocks[t // size] * size + t % size for t in range(tokens)])
    kv, rope_part = content[:, :rank], content[:, None, rank:]
    CPUMLAImpl.do_kv_cache_update(None, kv, rope_part, cache, slots, "auto", None)  # type: ignore[arg-type]

    described = json.loads(read_cache({LAYER: cache}, 8, False).json)
    (part,) = described["layers"][0]["parts"]
    assert (part["block_tokens"], part["rows"]) == (size, 1)
    token_bytes = part["row_bytes"] // size
    base = described["regions"][0]["base"] + part["offset_bytes"]
    for token in range(tokens):
        at = blocks[token // size] * part["block_stride_bytes"] + token % size * token_bytes
        raw = bytearray(ctypes.string_at(base + at, token_bytes))
        assert torch.equal(torch.frombuffer(raw, dtype=torch.float32), content[token])


def test_pages_are_opaque_unless_their_writer_was_asked() -> None:
    assert {"CPU_MLA"} == TOKEN_PAGES
    assert not has_token_pages(set())
    assert not has_token_pages({"CPU_ATTN"})
    assert not has_token_pages({"CPU_MLA", "CPU_ATTN"})
    opaque = json.loads(read_cache({LAYER: torch.zeros(8, 2, 16, 8)}, 8, True).json)
    assert opaque["layers"][0]["parts"][0]["block_tokens"] == 0
