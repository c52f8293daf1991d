#!/usr/bin/env python3
"""Lists what the connector relies on in one version of vLLM, from its sources alone.

``tools/vllm_hooks.py SOURCE`` reads a wheel (``pip download --no-deps vllm==VERSION``) or the
folder that holds ``vllm/``. Nothing of vLLM is imported, so a version that cannot be installed
here (CUDA only, another torch) can be listed too. The lists under ``tests/vllm/data`` are made by
it, and ``tests/vllm/test_hook_lists.py`` holds the connector against each of them.

The answer is JSON with four parts:

``hooks``      methods of the classes the connector derives from, with their signatures;
``calls``      how vLLM's own code calls each of these: positional arguments and keywords;
``uses``       each name that the connector takes from an object of vLLM's: where it is defined;
``functions``  functions of vLLM's that it calls, with their signatures.

A value of ``null`` is a name that this version does not have. With ``--check FILE`` the exit status
is 1, and the differences are told, when SOURCE does not give what FILE holds.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_names import BASE, FACTORY, FUNCTIONS, HOOK_CLASSES, METRICS, USES

# Where vLLM calls connectors from. Connectors call each other too (MultiConnector); that is theirs.
CALLERS = ("vllm/v1/", "vllm/model_executor/", "vllm/distributed/kv_transfer/", "vllm/config/")
NOT_CALLERS = ("vllm/distributed/kv_transfer/kv_connector/v1/",)
# The base class calls hooks of its own object, and the log adds up statistics.
CALLERS_TOO = (BASE, METRICS)
# Names under which vLLM's code holds a connector, its class, statistics or Prometheus metrics.
RECEIVERS = ("connector", "connector_cls", "kv_connector", "kv_transfer_group")
STATS_RECEIVERS = ("stats", "kv_connector_stats", "prom_metrics", "transfer_stats_accumulator")
OTHERS_RECEIVERS = ("ec_connector", "aux_output_connector")
CONSTRUCTORS = {"connector_cls": "KVConnectorBase_V1.__init__"}

FILE_BYTES_MAX = 4 << 20

Function = ast.FunctionDef | ast.AsyncFunctionDef


class HooksError(Exception):
    """A source that cannot be listed; the text says which file and why."""


class Source:
    """The Python files of one vLLM: a wheel, or a folder that holds ``vllm/``."""

    def __init__(self, place: Path) -> None:
        self._trees: dict[str, ast.Module | None] = {}
        self._wheel: zipfile.ZipFile | None = None
        self._folder = place
        if place.is_file():
            try:
                self._wheel = zipfile.ZipFile(place)
            except zipfile.BadZipFile as error:
                raise HooksError(f"{place} is no wheel: {error}") from error
            self._names = {name for name in self._wheel.namelist() if name.startswith("vllm/")}
        elif (place / "vllm").is_dir():
            found = (place / "vllm").rglob("*.py")
            self._names = {path.relative_to(place).as_posix() for path in found}
        else:
            raise HooksError(f"{place} is neither a wheel nor a folder that holds vllm/")

    def version(self) -> str:
        """vLLM's version, without the local part that names a build (``+cpu``)."""
        if self._wheel is not None:
            names = self._wheel.namelist()
        else:
            names = [f"{path.name}/METADATA" for path in self._folder.glob("vllm*.dist-info")]
        for name in names:
            distribution, _, file = name.partition(".dist-info/")
            if file == "METADATA" and distribution.startswith("vllm"):
                return distribution.rpartition("-")[2].partition("+")[0]
        raise HooksError(f"{self._folder}: no metadata of vLLM, so its version is not known")

    def names(self) -> list[str]:
        """The paths of all modules, sorted."""
        return sorted(name for name in self._names if name.endswith(".py"))

    def text(self, name: str) -> str:
        """One module's source; refuses one that is no source file by its size."""
        if self._wheel is not None:
            size = self._wheel.getinfo(name).file_size
        else:
            size = (self._folder / name).stat().st_size
        if size > FILE_BYTES_MAX:
            raise HooksError(f"{name} has {size} bytes; a module has at most {FILE_BYTES_MAX}")
        data = self._wheel.read(name) if self._wheel else (self._folder / name).read_bytes()
        return data.decode("utf-8")

    def tree(self, name: str) -> ast.Module | None:
        """One module parsed, or None where this version has no such module."""
        if name not in self._trees:
            found = None
            if name in self._names:
                try:
                    found = ast.parse(self.text(name))
                except (SyntaxError, ValueError) as error:
                    raise HooksError(f"{name} does not parse: {error}") from error
            self._trees[name] = found
        return self._trees[name]

    def find_class(self, module: str, name: str) -> ast.ClassDef | None:
        """A class by the module that defines it."""
        tree = self.tree(module)
        for node in tree.body if tree else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        return None


def decorators(node: Function) -> set[str]:
    """Last names of a function's decorators: ``abstractmethod``, ``property``, ``classmethod``."""
    return {ast.unparse(mark).rpartition(".")[2].split("(")[0] for mark in node.decorator_list}


def signature(node: Function) -> list[str]:
    """Parameters in order: ``name``, ``name=`` with a default, ``*name``, ``**name``; what follows
    a ``*`` or ``*name`` is taken by keyword only, what precedes a ``/`` by position only."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parts = []
    for index, argument in enumerate(positional):
        parts.append(argument.arg + ("=" if index >= first_default else ""))
        if arguments.posonlyargs and index == len(arguments.posonlyargs) - 1:
            parts.append("/")
    if arguments.vararg:
        parts.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        parts.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(argument.arg + ("=" if default is not None else ""))
    if arguments.kwarg:
        parts.append("**" + arguments.kwarg.arg)
    return parts


def methods(node: ast.ClassDef) -> dict[str, dict[str, Any]]:
    """Every method of a class itself: signature, kind, and whether it is abstract."""
    found: dict[str, dict[str, Any]] = {}
    for item in node.body:
        if isinstance(item, Function):
            marks = decorators(item)
            kind = next((k for k in ("classmethod", "staticmethod", "property") if k in marks), "")
            entry: dict[str, Any] = {"parameters": signature(item)}
            if kind:
                entry["kind"] = kind
            if "abstractmethod" in marks:
                entry["abstract"] = True
            found[item.name] = entry
    return found


def own_names(node: ast.ClassDef) -> dict[str, str]:
    """What a class itself defines: name to ``field``, ``method``, ``property`` or ``attribute``
    (set on ``self`` in one of its methods)."""
    found: dict[str, str] = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = "field"
        elif isinstance(item, ast.Assign):
            found.update({t.id: "field" for t in item.targets if isinstance(t, ast.Name)})
        elif isinstance(item, Function):
            cached = {"property", "cached_property"} & decorators(item)
            found[item.name] = "property" if cached else "method"
            for inner in ast.walk(item):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and isinstance(inner.value, ast.Name)
                    and inner.value.id == "self"
                ):
                    found.setdefault(inner.attr, "attribute")
    return found


def resolve(source: Source, module: str, name: str, depth: int = 0) -> dict[str, str] | None:
    """``own_names`` with those of the bases; None where this version has no such class."""
    node = source.find_class(module, name)
    if node is None or depth > 8:
        return None
    found: dict[str, str] = {}
    for base in node.bases:
        base_name = ast.unparse(base).rpartition(".")[2].split("[")[0]
        inherited = resolve(source, module, base_name, depth + 1)
        if inherited is None:
            imported = imported_from(source, module, base_name)
            inherited = resolve(source, imported, base_name, depth + 1) if imported else None
        found.update(inherited or {})
    return found | own_names(node)


def imported_from(source: Source, module: str, name: str) -> str | None:
    """The module from which ``module`` imports ``name``, where that is one of vLLM's."""
    tree = source.tree(module)
    for node in ast.walk(tree) if tree else ():
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and any(alias.name == name for alias in node.names)
        ):
            path = node.module.replace(".", "/") + ".py"
            return path if path != module else None
    return None


def receiver(node: ast.expr) -> str:
    """The last name of what a method is called on: ``connector`` of ``self.connector``,
    ``kv_transfer_group`` of ``get_kv_transfer_group()``."""
    if isinstance(node, ast.Call):
        return receiver(node.func).removeprefix("get_")
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    if isinstance(node, ast.Name):
        return node.id.lstrip("_")
    return ""


def calls_in(
    tree: ast.Module, known: dict[str, list[str]], base: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls of ``known`` methods on something that vLLM's code names as a connector or its
    statistics, in the module of the ``base`` class also on ``self``: (``Class.method``, shape)."""
    connectors = (*RECEIVERS, "self") if base else RECEIVERS
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        owners: list[str] = []
        if isinstance(node.func, ast.Attribute) and node.func.attr in known:
            held = receiver(node.func.value)
            if held in OTHERS_RECEIVERS:
                continue
            for owner in known[node.func.attr]:
                connector = owner in HOOK_CLASSES[BASE][:2]
                if held in (connectors if connector else STATS_RECEIVERS):
                    owners.append(f"{owner}.{node.func.attr}")
        elif isinstance(node.func, ast.Name) and node.func.id in CONSTRUCTORS:
            owners.append(CONSTRUCTORS[node.func.id])
        for owner_method in owners:
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            shape: dict[str, Any] = {
                "positional": sum(not isinstance(a, ast.Starred) for a in node.args),
                "keywords": sorted(k.arg for k in node.keywords if k.arg),
            }
            if starred or any(k.arg is None for k in node.keywords):
                shape["more"] = True
            yield owner_method, shape


def calls(source: Source, hooks: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The distinct shapes in which vLLM calls each method of ``hooks``."""
    known: dict[str, list[str]] = {}
    for owner, described in hooks.items():
        for method in (described or {}).get("methods", {}):
            known.setdefault(method, []).append(owner)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in source.names():
        if not name.startswith(CALLERS):
            continue
        if name.startswith(NOT_CALLERS) and name not in CALLERS_TOO:
            continue
        # Parsing three thousand modules takes a minute; those without a connector have no calls.
        if "connector" not in source.text(name):
            continue
        tree = source.tree(name)
        for method, shape in calls_in(tree, known, name == BASE) if tree else ():
            if shape not in found.setdefault(method, []):
                found[method].append(shape)
    order = lambda shape: (shape["positional"], shape["keywords"], "more" in shape)  # noqa: E731
    return {method: sorted(found[method], key=order) for method in sorted(found)}


def hook_list(source: Source) -> dict[str, Any]:
    """The whole list of one vLLM."""
    hooks: dict[str, Any] = {}
    for module, names in HOOK_CLASSES.items():
        for name in names:
            node = source.find_class(module, name)
            hooks[name] = None if node is None else {"module": module, "methods": methods(node)}
    uses: dict[str, Any] = {}
    for module, classes in USES.items():
        for name, wanted in classes.items():
            found = resolve(source, module, name)
            uses[name] = {
                "module": module if found is not None else None,
                "names": {attribute: (found or {}).get(attribute) for attribute in wanted},
            }
    functions: dict[str, Any] = {}
    for module, names in FUNCTIONS.items():
        tree = source.tree(module)
        body = tree.body if tree else []
        defined = {item.name: signature(item) for item in body if isinstance(item, Function)}
        for name in names:
            functions[name] = {"module": module, "parameters": defined.get(name)}
    factory = source.find_class(FACTORY, "KVConnectorFactory")
    register = methods(factory) if factory else {}
    functions["KVConnectorFactory.register_connector"] = {
        "module": FACTORY,
        "parameters": register.get("register_connector", {}).get("parameters"),
    }
    return {
        "vllm": source.version(),
        "hooks": hooks,
        "calls": calls(source, hooks),
        "uses": uses,
        "functions": functions,
    }


def to_text(listed: dict[str, Any]) -> str:
    """As committed: one line a method, call, class and function, so that a diff reads well."""
    lines = [f' "vllm": {json.dumps(listed["vllm"])}']
    hooks = []
    for owner, described in listed["hooks"].items():
        if described is None:
            hooks.append(f"  {json.dumps(owner)}: null")
            continue
        rows = ",\n".join(
            f"    {json.dumps(method)}: {json.dumps(entry)}"
            for method, entry in described["methods"].items()
        )
        inner = f"{{\n{rows}\n   }}" if rows else "{}"
        hooks.append(
            f'  {json.dumps(owner)}: {{\n   "module": {json.dumps(described["module"])},\n'
            f'   "methods": {inner}\n  }}'
        )
    lines.append(' "hooks": {\n' + ",\n".join(hooks) + "\n }")
    for part in ("calls", "uses", "functions"):
        rows = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in listed[part].items())
        lines.append(f' "{part}": {{\n{rows}\n }}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Lists the hooks and names of one vLLM that the connector relies on."
    )
    parser.add_argument("source", type=Path, help="a wheel, or the folder that holds vllm/")
    parser.add_argument("--out", type=Path, help="write here instead of to standard output")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with this list")
    arguments = parser.parse_args(argv)
    try:
        text = to_text(hook_list(Source(arguments.source)))
        if arguments.check:
            committed = arguments.check.read_text(encoding="utf-8")
            if committed == text:
                return 0
            names = (str(arguments.check), str(arguments.source))
            sys.stderr.writelines(
                difflib.unified_diff(committed.splitlines(True), text.splitlines(True), *names, n=0)
            )
            return 1
        if arguments.out:
            arguments.out.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    except (HooksError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
