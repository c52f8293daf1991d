"""The layout reader: true strides of torch tensors, and refusals that name the layer."""

from __future__ import annotations

import itertools
import json
import platform
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_kv.layout import (
    FIELD_BYTES_MAX,
    LayoutError,
    kv_scales,
    model_layers,
    page_format,
    read_cache,
    scale_texts,
    this_processor,
)

torch = pytest.importorskip("torch")

B, H, N, C = 5, 3, 4, 6


def bytes_at(cache: dict[str, Any], layer: int, block: int, head: int) -> list[float]:
    """The content of one (block, head), read from raw memory by the described strides."""
    import ctypes

    described = cache["layers"][layer]
    (part,) = described["parts"]
    region = cache["regions"][described["region"]]
    values: list[float] = []
    for row in range(part["rows"]):
        offset = (
            part["offset_bytes"]
            + block * part["block_stride_bytes"]
            + head * part["head_stride_bytes"]
            + row * part["row_stride_bytes"]
        )
        assert offset + part["row_bytes"] <= region["bytes"]
        raw = ctypes.string_at(region["base"] + offset, part["row_bytes"])
        values += torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist()
    return values


def filled(order: tuple[int, ...], pad: int) -> Any:
    """A ``[B, H, N, C]`` tensor with memory in ``order`` (outermost first), with gaps of ``pad``,
    starting at an odd offset of its storage."""
    shape = (B, H, N, C)
    stride = [0] * 4
    step = 1
    for axis in reversed(order):
        stride[axis] = step
        step = step * shape[axis] + pad
    storage = torch.full((step + 7 + 64,), -1.0)
    tensor = storage.as_strided(shape, stride, 7)
    tensor.copy_(torch.arange(B * H * N * C, dtype=torch.float32).view(shape))
    return tensor


@pytest.mark.parametrize("pad", [0, 8])
@pytest.mark.parametrize("order", [(*outer, 3) for outer in itertools.permutations(range(3))])
def test_every_order_of_blocks_heads_and_tokens(order: tuple[int, ...], pad: int) -> None:
    tensor = filled(order, pad)
    cache = json.loads(read_cache({"model.layers.0.attn": tensor}, B, False).json)
    assert cache["num_blocks"] == B
    assert cache["heads_held"] == H
    for block, head in itertools.product(range(B), range(H)):
        assert bytes_at(cache, 0, block, head) == tensor[block, head].reshape(-1).tolist()


def test_empty_strided_permutations_are_read_alike() -> None:
    stride = (H * C, C, B * H * C, 1)
    tensor = torch.empty_strided((B, H, N, C), stride).normal_()
    cache = json.loads(read_cache({"a": tensor}, B, False).json)
    (part,) = cache["layers"][0]["parts"]
    assert (part["rows"], part["row_stride_bytes"], part["row_bytes"]) == (N, B * H * C * 4, C * 4)
    assert bytes_at(cache, 0, 4, 2) == tensor[4, 2].reshape(-1).tolist()


def test_contiguous_pages_are_one_row() -> None:
    cache = json.loads(read_cache({"a": filled((0, 1, 2, 3), 0)}, B, True).json)
    (part,) = cache["layers"][0]["parts"]
    assert (part["rows"], part["row_bytes"]) == (1, N * C * 4)


def test_views_of_one_storage_are_one_region() -> None:
    size = B * H * N * C
    pool = torch.arange(3.0 + 2 * size)
    caches = {
        f"model.layers.{i}.attn": pool[3 + i * size :][:size].view(B, H, N, C) for i in range(2)
    }
    cache = read_cache(caches, B, True)
    described = json.loads(cache.json)
    assert described["regions"] == [{"base": pool.data_ptr(), "bytes": pool.nbytes}]
    offsets = [layer["parts"][0]["offset_bytes"] for layer in described["layers"]]
    assert offsets == [12, 12 + size * 4]
    assert [layer["name"] for layer in described["layers"]] == list(caches)
    assert cache.layer_names == tuple(caches)
    assert cache.dtype == "float32"
    # The storages must outlive every reader.
    assert all(kept is given for kept, given in zip(cache.tensors, caches.values(), strict=True))


@pytest.mark.parametrize("dims", [3, 4])
def test_a_latent_with_or_without_its_head_axis(dims: int) -> None:
    tensor = torch.randn(B, N, C) if dims == 3 else torch.randn(B, 1, N, C)
    cache = json.loads(read_cache({"a": tensor}, B, True).json)
    assert cache["heads_held"] == 1
    assert bytes_at(cache, 0, 3, 0) == tensor[3].reshape(-1).tolist()


@pytest.mark.parametrize(
    ("tensor", "opaque", "text"),
    [
        (lambda: torch.zeros(2, B, H, N, C), False, "layer a: a KV cache of shape (2, 5, 3, 4, 6)"),
        (lambda: torch.zeros(B, N), False, "layer a: a KV cache of shape (5, 4)"),
        (lambda: torch.zeros(B * 2, H, N, C), False, "layer a: 10 blocks in memory, 5 in the"),
        (lambda: torch.zeros(B, H, C, N).transpose(2, 3), False, "layer a: the content of a token"),
        (lambda: filled((0, 2, 1, 3), 0), True, "layer a: the page of a block and head"),
        (lambda: torch.zeros(B, H, N, C, device="meta"), False, "layer a: the KV cache is on meta"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(tensor: Any, opaque: bool, text: str) -> None:
    with pytest.raises(LayoutError) as error:
        read_cache({"a": tensor()}, B, opaque)
    assert text in str(error.value)


def test_layers_must_hold_equally_many_heads() -> None:
    caches = {"a": torch.zeros(B, H, N, C), "b": torch.zeros(B, 1, N, C)}
    with pytest.raises(LayoutError, match=r"unlike numbers of KV heads \[1, 3\]"):
        read_cache(caches, B, False)


def test_no_cache_at_all_is_refused() -> None:
    with pytest.raises(LayoutError, match="registered no KV cache"):
        read_cache({}, B, False)


def test_overlapping_rows_are_refused_by_the_core() -> None:
    from hetero_kv import _core

    shared = torch.zeros(1, H, N, C).expand(B, H, N, C)
    cache = read_cache({"model.layers.0.attn": shared}, B, False)
    with pytest.raises(ValueError, match="block_stride_bytes 0"):
        _core.Worker(worker_options(), cache.json)


def worker_options() -> str:
    """Options of a lone worker that serves nobody."""
    from hetero_kv.config import Settings

    engine = {
        "engine_id": "e",
        "dp_rank": 0,
        "dp_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "block_size": N,
        "kv_heads": H,
        "producer": False,
        "consumer": True,
    }
    settings = Settings({"host": "127.0.0.1"}).for_core("127.0.0.1")
    return json.dumps({"settings": settings, "engine": engine, "tp_rank": 0, "pp_rank": 0})


def test_layers_are_those_of_the_whole_model_however_it_is_staged() -> None:
    whole = model_layers({(0, 0): ("a", "b", "c")})
    assert whole.startswith("3:")
    # Registered in another order, cut into stages, on several ranks: the same model.
    assert model_layers({(0, 0): ("c", "a", "b")}) == whole
    assert model_layers({(1, 0): ("c",), (0, 0): ("a", "b")}) == whole
    staged = {(0, 0): ("a",), (0, 1): ("a",), (1, 0): ("b", "c"), (1, 1): ("c", "b")}
    assert model_layers(staged) == whole
    assert model_layers({(0, 0): ("a", "b", "d")}) != whole
    assert model_layers({(0, 0): ("a", "b")}) != whole


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ({(0, 0): ("a", "b"), (1, 0): ("b",)}, ["layer b", "stages 0 and 1"]),
        ({(0, 0): ("a", "b"), (0, 1): ("a",)}, ["layer b", "(pp 0, tp 0)", "(pp 0, tp 1)"]),
    ],
)
def test_workers_that_do_not_make_one_model_are_refused(layers: Any, words: list[str]) -> None:
    with pytest.raises(LayoutError) as error:
        model_layers(layers)
    for word in words:
        assert word in str(error.value)


def test_a_page_format_names_what_has_to_be_equal() -> None:
    assert page_format({"CPU_MLA"}, "x86_64", 16) == "CPU_MLA, by token"
    attention = page_format({"CPU_ATTN"}, "x86_64", 32)
    assert attention == "CPU_ATTN on x86_64, whole pages of 32 tokens"
    assert attention != page_format({"CPU_ATTN"}, "x86_64+amx_tile", 32)
    assert attention != page_format({"CPU_ATTN"}, "x86_64", 16)


def test_a_processor_is_named_by_what_kernels_are_chosen_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert this_processor().startswith(platform.machine())
    able = {"architecture": "x86_64", "avx512_f": True, "amx_tile": True, "avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert this_processor() == "x86_64+avx512_f+amx_tile"
    able["amx_tile"] = False
    assert this_processor() == "x86_64+avx512_f"


def scaled(k: Any, v: Any, **more: Any) -> Any:
    return SimpleNamespace(_k_scale=torch.tensor(k), _v_scale=torch.tensor(v), **more)


def test_scales_are_read_from_the_layers() -> None:
    layers = {"a": scaled(0.5, 0.25), "b": scaled(1.0, 0.1)}
    texts = scale_texts(layers, True)
    # As the number that the kernels divide by, which is no 0.1.
    assert texts == {"a": "0.5/0.25", "b": "1.0/0.10000000149011612"}
    assert scale_texts(layers, False) == {}


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (scaled(1.0, 1.0, calculate_kv_scales=True), "layer a: .*--calculate-kv-scales"),
        (scaled([1.0, 2.0], 1.0), "layer a: .* k scale .*2 values"),
        (SimpleNamespace(_k_scale=torch.tensor(1.0)), "layer a: .* v scale"),
    ],
)
def test_scales_that_a_pair_cannot_share_are_refused_by_layer(layer: Any, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        scale_texts({"a": layer}, True)


def test_the_scales_of_every_layer_are_in_the_field() -> None:
    names = [f"model.layers.{i}.self_attn.attn" for i in range(200)]
    same = dict.fromkeys(names, "0.5/0.5")
    assert kv_scales({}) == "none"
    assert kv_scales(same) == "all 200 layers=0.5/0.5"
    few = kv_scales({name: f"{i}.0/1.0" for i, name in enumerate(names[:3])})
    assert few.split(";")[1] == "model.layers.1.self_attn.attn=1.0/1.0"
    # Each change of one layer changes the field, however many layers there are.
    for count in (2, 60, 200):
        values = {
            kv_scales({**dict.fromkeys(names[:count], "0.5/0.5"), n: "0.5/1.0"})
            for n in names[:count]
        }
        assert len(values) == count
        assert all(len(value.encode()) <= FIELD_BYTES_MAX for value in values)
        assert all("=0.5/1.0" in value for value in values)
    many = {f"model.{'x' * 40}.{i}.{i}": f"{i}.0/1.0" for i in range(500)}
    assert len(kv_scales(many).encode()) <= FIELD_BYTES_MAX
    assert kv_scales(many) != kv_scales({**many, next(iter(many)): "9.5/1.0"})
