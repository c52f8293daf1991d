"""KV caches in plain memory: how they lie, what their bytes must be, and a naive oracle.

Nothing here is shared with the code under test: heads are dealt out, bytes are addressed and
copies are predicted by numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Model:
    """What both engines of a pair agree on."""

    kv_heads: int
    """Over all ranks; 0 for a latent, which every rank holds whole."""
    layers: int = 3
    parts: int = 2
    """Pieces of a layer: K and V, or one."""
    block_size: int = 4
    token_bytes: int = 24
    opaque: bool = False
    """The page of a (block, head) is one row instead of one row per token."""

    @property
    def rows(self) -> int:
        return 1 if self.opaque else self.block_size

    @property
    def row_bytes(self) -> int:
        return self.block_size * self.token_bytes if self.opaque else self.token_bytes

    @property
    def page_format(self) -> str:
        """As the connector names what it finds."""
        return f"TEST, whole pages of {self.block_size} tokens" if self.opaque else "TEST, by token"

    @property
    def head_bytes(self) -> int:
        """Bytes of one (block, head) over all layers."""
        return self.layers * self.parts * self.rows * self.row_bytes

    def heads_of(self, tp_size: int, tp_rank: int) -> list[int]:
        """Global heads that a rank holds."""
        if self.kv_heads == 0:
            return [0]
        if tp_size > self.kv_heads:
            return [tp_rank * self.kv_heads // tp_size]
        each = self.kv_heads // tp_size
        return list(range(tp_rank * each, (tp_rank + 1) * each))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def layers_of(self, pp_size: int, pp_rank: int) -> range:
        """Layers of a pipeline stage."""
        # Unlike vLLM's shares where they are not even: layers pair by name.
        held = np.array_split(np.arange(self.layers), pp_size)[pp_rank]
        return range(int(held[0]), int(held[-1]) + 1)


@dataclass(frozen=True)
class Style:
    """How one engine stores it."""

    num_blocks: int = 96
    tokens_outside_heads: bool = True
    """NHD; else HND."""
    joint: bool = False
    """K and V of a block lie side by side; else each has its own array."""
    pad_bytes: int = 0
    """Behind each row, head and block."""
    skew_bytes: int = 0
    """From the start of the allocation to the region."""
    regions: int = 1
    reverse_layers: bool = False
    one_row: bool = False
    """Described as one row of all tokens; only where nothing lies between two of them."""


PLAIN = Style()
PADDED = Style(
    num_blocks=80,
    tokens_outside_heads=False,
    joint=True,
    pad_bytes=5,
    skew_bytes=3,
    regions=2,
    reverse_layers=True,
)
ODD = Style(num_blocks=72, joint=True, pad_bytes=1, skew_bytes=1, regions=2)


@dataclass(frozen=True)
class Place:
    """One rank in its engine."""

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0


@dataclass(frozen=True)
class Part:
    offset: int
    block_stride: int
    head_stride: int
    row_stride: int


@dataclass
class RankMemory:
    """One rank's buffers and the (block, head, row, byte) views into them."""

    model: Model
    style: Style
    heads: list[int]
    regions: list[Bytes] = field(default_factory=list)
    placed: dict[int, tuple[int, list[Part]]] = field(default_factory=dict)
    """Layer to region and parts."""

    @classmethod
    def allocate(cls, model: Model, style: Style, place: Place) -> RankMemory:
        heads = model.heads_of(place.tp_size, place.tp_rank)
        memory = cls(model, style, heads)
        ends = [0] * style.regions
        order = model.layers_of(place.pp_size, place.pp_rank)
        for layer in reversed(order) if style.reverse_layers else order:
            region = layer % style.regions
            parts, ends[region] = _place(model, style, len(heads), ends[region])
            memory.placed[layer] = (region, parts)
        for end in ends:
            whole = np.zeros(style.skew_bytes + end + 7, dtype=np.uint8)
            memory.regions.append(whole[style.skew_bytes :])
        return memory

    def view(self, layer: int, part: int, region: Bytes | None = None) -> Bytes:
        """``[block, head, row, byte]`` of one part, in our memory or in a copy of the region."""
        index, parts = self.placed[layer]
        at = parts[part]
        base = self.regions[index] if region is None else region
        return as_strided(
            base[at.offset :],
            shape=(self.style.num_blocks, len(self.heads), self.model.rows, self.model.row_bytes),
            strides=(at.block_stride, at.head_stride, at.row_stride, 1),
        )

    def fill_all(self, seed: int) -> None:
        """Every byte, gaps included, from a generator of this seed."""
        random = np.random.default_rng(seed)
        for region in self.regions:
            region[:] = random.integers(0, 256, region.size, dtype=np.uint8)

    def fill_blocks(self, seed: int, generation: int, blocks: list[int]) -> None:
        """What a forward pass would write into these blocks."""
        for layer in self.placed:
            for part in range(self.model.parts):
                self.view(layer, part)[blocks] = pattern(
                    self.model, seed, generation, layer, part, self.heads, blocks
                )

    def describe(self) -> dict[str, object]:
        """As the core takes it."""
        model = self.model
        assert not self.style.one_row or not (
            self.style.pad_bytes or self.style.tokens_outside_heads
        )
        rows = 1 if self.style.one_row else model.rows
        row_bytes = model.rows * model.row_bytes // rows
        tokens = {} if model.opaque else {"block_tokens": model.block_size}
        return {
            "num_blocks": self.style.num_blocks,
            "heads_held": len(self.heads),
            "regions": [{"base": r.ctypes.data, "bytes": r.size} for r in self.regions],
            "layers": [
                {
                    "name": f"model.layers.{layer}.self_attn.attn",
                    "region": region,
                    "parts": [
                        {
                            "offset_bytes": part.offset,
                            "block_stride_bytes": part.block_stride,
                            "head_stride_bytes": part.head_stride,
                            "rows": rows,
                            "row_stride_bytes": row_bytes if rows == 1 else part.row_stride,
                            "row_bytes": row_bytes,
                            **tokens,
                        }
                        for part in parts
                    ],
                }
                for layer, (region, parts) in self.placed.items()
            ],
        }


def _place(model: Model, style: Style, heads: int, start: int) -> tuple[list[Part], int]:
    row = model.row_bytes + style.pad_bytes
    if style.tokens_outside_heads:
        head_stride, row_stride = row, heads * row
        page = model.rows * row_stride
    else:
        head_stride, row_stride = model.rows * row + style.pad_bytes, row
        page = heads * head_stride
    page += style.pad_bytes
    parts = []
    for part in range(model.parts):
        if style.joint:
            offset, block_stride = start + part * page, model.parts * page
        else:
            offset, block_stride = start + part * page * style.num_blocks, page
        parts.append(Part(offset, block_stride, head_stride, row_stride))
    gap = 13 if style.pad_bytes else 0
    return parts, start + model.parts * page * style.num_blocks + gap


def pattern(
    model: Model,
    seed: int,
    generation: int,
    layer: int,
    part: int,
    heads: list[int],
    blocks: list[int],
) -> Bytes:
    """``[block, head, row, byte]``: each byte a hash of where it is, of which engine's KV it is
    and of which prompt that the block has held."""
    with np.errstate(over="ignore"):
        key = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
        key += np.uint64(generation) * np.uint64(0xC2B2AE3D27D4EB4F)
        key += np.uint64(layer * 64 + part) * np.uint64(0x165667B19E3779F9)
        hashed = (
            key
            + _axis(blocks, 0x27D4EB2F165667C5)[:, None, None, None]
            + _axis(heads, 0x85EBCA77C2B2AE63)[None, :, None, None]
            + _axis(range(model.rows), 0xFF51AFD7ED558CCD)[None, None, :, None]
            + _axis(range(model.row_bytes), 0xC4CEB9FE1A85EC53)[None, None, None, :]
        )
        hashed ^= hashed >> np.uint64(33)
        hashed *= np.uint64(0xFF51AFD7ED558CCD)
        hashed ^= hashed >> np.uint64(29)
    found: Bytes = (hashed >> np.uint64(40)).astype(np.uint8)
    return found


def _axis(values: range | list[int], factor: int) -> NDArray[np.uint64]:
    scaled: NDArray[np.uint64] = np.asarray(list(values), dtype=np.uint64) * np.uint64(factor)
    return scaled


@dataclass(frozen=True)
class Moved:
    """Tokens of a prompt as a prefill engine holds them."""

    model: Model
    seed: int
    generation: int
    blocks: list[int]
    first_token: int
    past_token: int


class Image:
    """What one decode rank's memory must be, byte for byte."""

    def __init__(self, model: Model, style: Style, place: Place, seed: int) -> None:
        self._memory = RankMemory.allocate(model, style, place)
        self._memory.fill_all(seed)
        self._unknown = [np.zeros(region.size, dtype=bool) for region in self._memory.regions]

    def copy(self, moved: Moved, dest: list[int]) -> None:
        """Blocks of a prefill engine have been read into these of ours, which hold the sequence
        from token ``moved.first_token`` on."""
        memory = self._memory
        for layer, (region, _) in memory.placed.items():
            for part in range(memory.model.parts):
                source = pattern(
                    moved.model,
                    moved.seed,
                    moved.generation,
                    layer,
                    part,
                    memory.heads,
                    moved.blocks,
                )
                view = memory.view(layer, part)
                unknown = memory.view(layer, part, self._unknown[region].view(np.uint8))
                if moved.model.block_size == memory.model.block_size:
                    first = moved.first_token // memory.model.block_size
                    view[dest] = source[first : first + len(dest)]
                    unknown[dest] = 0
                    continue
                ours, theirs = memory.model.block_size, moved.model.block_size
                first = moved.first_token
                end = min(first + len(dest) * ours, -(-moved.past_token // theirs) * theirs)
                for token in range(first, end):
                    block, row = dest[(token - first) // ours], (token - first) % ours
                    view[block, :, row] = source[token // theirs, :, token % theirs]
                    unknown[block, :, row] = 0

    def forget(self, dest: list[int]) -> None:
        """A failed read may have written some of these blocks."""
        memory = self._memory
        for layer, (region, _) in memory.placed.items():
            for part in range(memory.model.parts):
                memory.view(layer, part, self._unknown[region].view(np.uint8))[dest] = 1

    def differences(self, regions: list[bytes]) -> str | None:
        """``None`` when a snapshot is as it must be, else what differs first."""
        for index, (expected, got) in enumerate(zip(self._memory.regions, regions, strict=True)):
            seen = np.frombuffer(got, dtype=np.uint8)
            wrong = np.flatnonzero((seen != expected) & ~self._unknown[index])
            if wrong.size:
                first = int(wrong[0])
                return (
                    f"{wrong.size} of {expected.size} bytes differ in region {index}, first at "
                    f"{first}: {seen[first]} instead of {expected[first]}"
                )
        return None
