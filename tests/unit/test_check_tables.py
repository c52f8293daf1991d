"""The check of the tables of tests finds what it is for."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[1] / "check_tables.py"
HEAD = "| event | test |\n|---|---|\n"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tables", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("| a | `test_sound` |\n", []),
        ("| a | none |\n", ["line 3: 'a' names no test"]),
        ("| a | `test_gone` |\n", ["line 3: no test test_gone is collected"]),
        ("| a | `test_sound`, `test_empty` |\n", ["line 3: the test test_empty asserts nothing"]),
        ("", ["no rows"]),
    ],
)
def test_rows_are_checked(tool: ModuleType, row: str, told: list[str]) -> None:
    known = {"test_sound": True, "test_empty": False}
    assert list(tool.faults(tool.Page(TOOL), HEAD + row, known)) == told


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("| a (C1, C2) | `test_sound` |\n| b (R4) | `test_sound` |\n", []),
        ("| a (C1) | `test_sound` |\n| b (C1) | `test_sound` |\n", ["no row has the cases C2, R4"]),
        (
            "| a (C1, C2, C3) | `test_sound` |\n| b (R4) | `test_sound` |\n| c | `test_sound` |\n",
            ["line 3: there is no case C3"],
        ),
        # In words it is no mark, nor in another cell.
        ("| a (C1) of (C2) and R4 | `test_sound` (R4) |\n", ["no row has the cases C1, C2, R4"]),
    ],
)
def test_every_expected_case_has_a_row(tool: ModuleType, rows: str, told: list[str]) -> None:
    page = tool.Page(TOOL, cases={"C": frozenset({1, 2}), "R": frozenset({4})})
    assert list(tool.faults(page, HEAD + rows, {"test_sound": True})) == told


def test_other_tables_and_reasons_are_taken_where_a_page_allows_them(tool: ModuleType) -> None:
    other = "| a | b |\n|---|---|\n| c | d |\n\n"
    row = "| e | `test_sound` |\n"
    known = {"test_sound": True}
    assert list(tool.faults(tool.Page(TOOL), other + HEAD + row, known)) == []
    strict = tool.Page(TOOL, all_tables=True)
    assert list(tool.faults(strict, other + HEAD + row, known)) == [
        "line 3: its table has no column of tests"
    ]
    reasons = tool.Page(TOOL, reasons=True)
    reason = "| f | there is no such queue here, `test_gone` |\n| g | no |\n"
    assert list(tool.faults(reasons, HEAD + row + reason, known)) == [
        "line 5: 'g' names no test and gives no reason"
    ]


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


def test_only_what_is_collected_is_known(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "def test_found():\n    assert f()\n\n\n"
        "def outer():\n    def test_nested():\n        assert f()\n",
        encoding="utf-8",
    )
    source = tmp_path / "rust" / "crate" / "src"
    (source / "inner").mkdir(parents=True)
    test = "#[test]\nfn {name}() {{\n    assert!(f());\n}}\n"
    (source / "lib.rs").write_text("mod inner;\n", encoding="utf-8")
    (source / "inner.rs").write_text("#[cfg(test)]\nmod tests;\n", encoding="utf-8")
    (source / "inner" / "tests.rs").write_text(
        test.format(name="reached") + '#[test]\n#[ignore = "slow"]\nfn left_out() {\n'
        "    assert!(f());\n}\n",
        encoding="utf-8",
    )
    (source / "orphan_tests.rs").write_text(test.format(name="orphan"), encoding="utf-8")
    assert dict(tool.python_tests()) == {"test_found": True}
    assert dict(tool.rust_tests()) == {"reached": True}
