"""Reads what vLLM registered, KV cache tensors and configuration, into plain numbers and fields.

The planner never sees a tensor: it gets regions by address and length, and for each layer the true
strides of its blocks and heads (RFC #42082: vLLM's per-layer view is always ``[B, H, N, C]``,
block, head, token, content, whatever its order in memory is).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Backends whose (block, head) page is opaque: rows of tokens cannot be told apart in it. vLLM's CPU
# attention stores a K page and a V page there, K packed for the instruction set.
OPAQUE_PAGES = frozenset({"CPU_ATTN"})


class LayoutError(ValueError):
    """A cache that this version cannot describe; the text names the layer and what is wrong."""


@dataclass(frozen=True)
class Cache:
    """One rank's cache as the core takes it (``json``), and the tensors that keep it alive."""

    json: str
    tensors: tuple[Any, ...]
    layer_names: tuple[str, ...]
    dtype: str


def read_cache(kv_caches: Mapping[str, torch.Tensor], num_blocks: int, opaque_pages: bool) -> Cache:
    """Describes the tensors of ``register_kv_caches``.

    Each is ``[B, H, N, C]`` or, for one latent head, ``[B, N, C]``; ``B`` must be ``num_blocks``.
    Raises :class:`LayoutError`.
    """
    if not kv_caches:
        raise LayoutError("vLLM registered no KV cache")
    regions: dict[int, tuple[int, int]] = {}
    layers = []
    heads_held = set()
    for name, tensor in kv_caches.items():
        if tensor.device.type != "cpu":
            raise LayoutError(
                f"layer {name}: the KV cache is on {tensor.device}; in this version only memory of "
                "the host is read and written (vLLM's CPU platform)"
            )
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if len(shape) == 3:
            shape, stride = (shape[0], 1, *shape[1:]), (stride[0], 0, *stride[1:])
        if len(shape) != 4:
            raise LayoutError(
                f"layer {name}: a KV cache of shape {tuple(tensor.shape)} is not supported; "
                "[blocks, heads, tokens, content] is"
            )
        if shape[0] != num_blocks:
            raise LayoutError(
                f"layer {name}: {shape[0]} blocks in memory, {num_blocks} in the block table; "
                "kernel blocks smaller than vLLM's blocks are not supported (set --block-size)"
            )
        heads_held.add(shape[1])
        storage = tensor.untyped_storage()
        base = storage.data_ptr()
        index = regions.setdefault(base, (len(regions), storage.nbytes()))[0]
        item = tensor.element_size()
        layers.append(
            {
                "name": name,
                "region": index,
                "parts": [_part(name, shape, stride, item, tensor.data_ptr() - base, opaque_pages)],
            }
        )
    if len(heads_held) != 1:
        raise LayoutError(f"layers with unlike numbers of KV heads {sorted(heads_held)}")
    cache = {
        "num_blocks": num_blocks,
        "heads_held": heads_held.pop(),
        "regions": [{"base": base, "bytes": size} for base, (_, size) in regions.items()],
        "layers": layers,
    }
    tensors = tuple(kv_caches.values())
    return Cache(
        json=json.dumps(cache),
        tensors=tensors,
        layer_names=tuple(kv_caches),
        dtype=str(tensors[0].dtype).removeprefix("torch."),
    )


def _part(
    name: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    item: int,
    offset: int,
    opaque_pages: bool,
) -> dict[str, int]:
    _, _, tokens, content = shape
    if stride[3] != 1 and content > 1:
        raise LayoutError(f"layer {name}: the content of a token is not contiguous")
    page = {
        "offset_bytes": offset,
        "block_stride_bytes": stride[0] * item,
        "head_stride_bytes": stride[1] * item,
    }
    if stride[2] == content or tokens == 1:
        whole = tokens * content * item
        return page | {"rows": 1, "row_stride_bytes": whole, "row_bytes": whole}
    if opaque_pages:
        raise LayoutError(f"layer {name}: the page of a block and head is not contiguous")
    return page | {
        "rows": tokens,
        "row_stride_bytes": stride[2] * item,
        "row_bytes": content * item,
    }


def compat_fields(vllm_config: Any, block_size: int, cache: Cache, backends: str) -> dict[str, str]:
    """What must be equal on both sides of a pair, each by a name that a refusal can show."""
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    names = "\n".join(cache.layer_names).encode()
    return {
        "model": str(model.model).rstrip("/").rpartition("/")[2],
        "model_config": _config_digest(model.hf_text_config),
        "revision": str(model.revision or "none"),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": cache.dtype,
        "kv_quantization": str(vllm_config.cache_config.cache_dtype),
        "kv_heads": str(total_kv_heads(model)),
        "head_size": str(model.get_head_size()),
        "mla": str(bool(model.use_mla)).lower(),
        "block_size": str(block_size),
        "page_format": backends,
        "layers": f"{len(cache.layer_names)}:{hashlib.sha256(names).hexdigest()[:16]}",
        "speculative_config": str(getattr(speculative, "method", None) or "none"),
    }


def total_kv_heads(model_config: Any) -> int:
    """KV heads over all ranks; 0 for MLA, whose one latent every rank holds whole."""
    return 0 if model_config.use_mla else int(model_config.get_total_num_kv_heads())


def _config_digest(hf_config: Any) -> str:
    """Digest of the model's architecture, without what may differ between two copies of it."""
    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
    values = {k: v for k, v in hf_config.to_dict().items() if k not in ignored}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
