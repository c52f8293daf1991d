"""The checker of docs/failures.md finds what it is for."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "check_failures.py"
HEAD = "| event | test |\n|---|---|\n"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_failures", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("| a | `test_sound` |\n", []),
        ("| a | none |\n", ["line 3: 'a' names no test"]),
        ("| a | `test_gone` |\n", ["line 3: there is no test test_gone"]),
        ("| a | `test_sound`, `test_empty` |\n", ["line 3: the test test_empty asserts nothing"]),
        ("", ["no rows"]),
    ],
)
def test_rows_are_checked(tool: ModuleType, row: str, told: list[str]) -> None:
    known = {"test_sound": True, "test_empty": False}
    assert list(tool.faults(HEAD + row, known)) == told


@pytest.mark.parametrize(
    ("body", "sound"),
    [
        ("x = f()", False),
        ("assert x", True),
        ("with pytest.raises(ValueError): f()", True),
        ("site.require_nothing_held()", True),
        ("print('fine')", False),
    ],
)
def test_a_test_that_asserts_nothing_is_seen(tool: ModuleType, body: str, sound: bool) -> None:
    assert tool.asserts(ast.parse(f"def test_x():\n    {body}\n")) is sound


def test_the_projects_own_tests_are_found(tool: ModuleType) -> None:
    known = dict([*tool.python_tests(), *tool.rust_tests()])
    assert known["test_rows_are_checked"]
    # Alone, in a module of its crate; and listed by a macro for each transport.
    assert known["an_expired_lease_fails_without_a_read"]
    assert known["a_lease_bumped_during_a_slow_fetch_is_gone"]
