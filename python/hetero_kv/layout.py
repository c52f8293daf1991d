"""Reads what vLLM registered, KV cache tensors and configuration, into plain numbers and fields.

The planner never sees a tensor: it gets regions by address and length, and for each layer the true
strides of its blocks and heads (RFC #42082: vLLM's per-layer view is always ``[B, H, N, C]``,
block, head, token, content, whatever its order in memory is).
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Backends whose cache writer puts a token's content where the tensor's strides say, so that blocks
# can be cut by token (``tests/vllm/test_layout_oracle.py`` asks the writer itself). The pages of
# all others are opaque and move whole: vLLM's CPU attention views its page as a K page and a V
# page, K packed for the processor, whatever the tensor's shape says.
TOKEN_PAGES = frozenset({"CPU_MLA"})

# A compatibility field's longest value is 4096 bytes (``rust/hetero-kv-core``).
FIELD_BYTES_MAX = 4096


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
        # 0: the tokens of a page cannot be told apart.
        "block_tokens": 0 if opaque_pages else tokens,
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


def has_token_pages(backends: Set[str]) -> bool:
    """Whether the caches of all these attention backends can be cut by token."""
    return bool(backends) and backends <= TOKEN_PAGES


def page_format(backends: Set[str], processor: str, block_size: int) -> str:
    """The compatibility field `page_format`: who lays out the inside of a (block, head) page and,
    where only whole pages can be moved, for which processor and how many tokens one has."""
    names = "+".join(sorted(backends)) or "unknown"
    if has_token_pages(backends):
        return f"{names}, by token"
    return f"{names} on {processor}, whole pages of {block_size} tokens"


def this_processor() -> str:
    """What vLLM's CPU kernels are chosen by: others pack a page in another order."""
    import torch

    able = torch.cpu.get_capabilities()
    wide = [name for name in ("avx512_f", "amx_tile") if able.get(name)]
    return "+".join([str(able.get("architecture") or platform.machine()), *wide])


def scale_texts(layers: Mapping[str, Any], quantized: bool) -> dict[str, str]:
    """Per layer the scales that its cached values were divided by: `k/v`. ``layers``: vLLM's
    attention layers by name. Empty for a cache that is not quantized.

    Raises :class:`LayoutError` for scales that are computed from the first tokens: each engine
    would find its own.
    """
    if not quantized:
        return {}
    texts = {}
    for name, layer in layers.items():
        if getattr(layer, "calculate_kv_scales", False):
            raise LayoutError(
                f"layer {name}: its KV scales are computed at run time (--calculate-kv-scales); a "
                "prefill and a decode engine need the same ones, so only scales of the checkpoint "
                "are supported"
            )
        texts[name] = "/".join(_scale(name, layer, side) for side in "kv")
    return texts


def _scale(name: str, layer: Any, side: str) -> str:
    """The one number that a layer's keys or values were divided by, exactly."""
    scale = getattr(layer, f"_{side}_scale", None)
    if scale is None:
        raise LayoutError(f"layer {name}: a quantized KV cache whose {side} scale is not known")
    if scale.numel() != 1:
        raise LayoutError(
            f"layer {name}: its {side} scale has {scale.numel()} values; one for the whole layer "
            "is supported"
        )
    return repr(float(scale.item()))


def kv_scales(texts: Mapping[str, str]) -> str:
    """The compatibility field `kv_scales` over the layers of the whole model: each layer's scales,
    as items that a refusal can tell apart by layer."""
    if not texts:
        return "none"
    value = ";".join(f"{name}={texts[name]}" for name in sorted(texts))
    if len(set(texts.values())) == 1:
        value = f"all {len(texts)} layers={next(iter(texts.values()))}"
    if len(value.encode()) > FIELD_BYTES_MAX:
        # Without the parts that all names share the layer's number is left.
        value = ";".join(f"{_shortest(name)}={texts[name]}" for name in sorted(texts))
    if len(value.encode()) > FIELD_BYTES_MAX:
        value = f"{len(texts)} layers, sha256 {hashlib.sha256(value.encode()).hexdigest()}"
    return value


def _shortest(name: str) -> str:
    numbers = [part for part in name.split(".") if part.isdigit()]
    return numbers[0] if len(numbers) == 1 else name


def compat_fields(
    vllm_config: Any, group_kinds: str, cache: Cache, page_format: str
) -> dict[str, str]:
    """What must be equal on both sides of a pair, each by a name that a refusal can show, as far as
    one rank knows it: :func:`model_layers` and :func:`kv_scales` add what spans all stages."""
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
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
        "group_kinds": group_kinds,
        "page_format": page_format,
        "speculative_config": str(getattr(speculative, "method", None) or "none"),
    }


def model_layers(layer_names: Mapping[tuple[int, int], Sequence[str]]) -> str:
    """The compatibility field `layers`: how many the whole model has and a digest of their names,
    whatever the stages they are cut into. ``layer_names``: of each worker, by (pp, tp) rank.

    Raises :class:`LayoutError` when the ranks of a stage differ or two stages have one layer.
    """
    stage_of: dict[str, int] = {}
    first_of: dict[int, tuple[int, set[str]]] = {}
    for (pp_rank, tp_rank), names in sorted(layer_names.items()):
        if pp_rank in first_of:
            first, known = first_of[pp_rank]
            if known != set(names):
                raise LayoutError(
                    f"layer {min(known ^ set(names))} is on one of the workers (pp {pp_rank}, "
                    f"tp {first}) and (pp {pp_rank}, tp {tp_rank}) and not on the other"
                )
            continue
        first_of[pp_rank] = (tp_rank, set(names))
        for name in names:
            if name in stage_of:
                raise LayoutError(
                    f"layer {name} is in the pipeline stages {stage_of[name]} and {pp_rank}"
                )
            stage_of[name] = pp_rank
    digest = hashlib.sha256("\n".join(sorted(stage_of)).encode()).hexdigest()
    return f"{len(stage_of)}:{digest[:16]}"


def total_kv_heads(model_config: Any) -> int:
    """KV heads over all ranks; 0 for MLA, whose one latent every rank holds whole."""
    return 0 if model_config.use_mla else int(model_config.get_total_num_kv_heads())


def _config_digest(hf_config: Any) -> str:
    """Digest of the model's architecture, without what may differ between two copies of it."""
    ignored = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
    values = {k: v for k, v in hf_config.to_dict().items() if k not in ignored}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
