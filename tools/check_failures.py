"""Checks that every row of docs/failures.md names tests that exist and assert something.

Exit status 1 with one line for each fault. Names are those of Python tests under `tests/` and of
Rust tests under `rust/`, in the last column, in backticks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "failures.md"

NAME = re.compile(r"`([a-z_][a-z0-9_]*)`")
RUST_TEST = re.compile(
    r"#\[(?:\w+::)*test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:async\s+)?fn\s+(\w+)\s*\("
)
# Tests that run once for each transport stand as plain functions that a macro lists.
RUST_FUNCTION = re.compile(
    r"^(?:pub(?:\([^)]*\))?\s+)?(?:async\s+)?fn\s+(\w+)\s*[(<]", re.MULTILINE
)
RUST_ASSERTS = re.compile(r"\b(?:assert|assert_eq|assert_ne|assert_matches|prop_assert\w*|panic)!")
# Helpers of the test suites that assert on their own.
PYTHON_ASSERTING_CALLS = re.compile(r"^(require_|assert_|check_|expect_)")


def asserts(function: ast.AST) -> bool:
    """Whether a Python test can fail by what it sees."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name == "raises" or PYTHON_ASSERTING_CALLS.match(name):
                return True
    return False


def python_tests() -> Iterator[tuple[str, bool]]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and node.name.startswith("test_"):
                yield node.name, asserts(node)


def rust_body(text: str, start: int) -> str:
    """From the function's name to the closing brace at the start of its line's indentation."""
    line = text.rfind("\n", 0, start) + 1
    indent = re.match(r"[ \t]*", text[line:])
    closing = re.compile(rf"^{re.escape(indent[0] if indent else '')}\}}", re.MULTILINE)
    end = closing.search(text, start)
    return text[start : end.end() if end else len(text)]


def rust_tests() -> Iterator[tuple[str, bool]]:
    for path in sorted((ROOT / "rust").rglob("*.rs")):
        text = path.read_text(encoding="utf-8")
        if "test" not in path.as_posix() and "#[test]" not in text:
            continue
        helpers = {
            match[1]
            for match in RUST_FUNCTION.finditer(text)
            if RUST_ASSERTS.search(rust_body(text, match.start(1)))
        }
        names = {match[1]: match.start(1) for match in RUST_TEST.finditer(text)}
        if "/tests/it/" in path.as_posix():
            names |= {match[1]: match.start(1) for match in RUST_FUNCTION.finditer(text)}
        for name, start in names.items():
            body = rust_body(text, start)
            called = set(re.findall(r"\b(\w+)\(", body)) - {name}
            yield name, bool(RUST_ASSERTS.search(body) or called & helpers)


def rows(page: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each table row without headings."""
    heading = True
    for number, line in enumerate(page.splitlines(), start=1):
        if not line.startswith("|"):
            heading = True
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if heading or set(line) <= set("|-: "):
            heading = False
            continue
        yield number, cells


def faults(page: str, known: dict[str, bool]) -> Iterator[str]:
    found = 0
    for number, cells in rows(page):
        found += 1
        names = NAME.findall(cells[-1])
        if not names:
            yield f"line {number}: {cells[0]!r} names no test"
        for name in names:
            if name not in known:
                yield f"line {number}: there is no test {name}"
            elif not known[name]:
                yield f"line {number}: the test {name} asserts nothing"
    if not found:
        yield "no rows"


def main() -> int:
    known: dict[str, bool] = {}
    for name, sound in [*python_tests(), *rust_tests()]:
        known[name] = known.get(name, False) or sound
    wrong = list(faults(PAGE.read_text(encoding="utf-8"), known))
    for line in wrong:
        print(f"{PAGE.relative_to(ROOT)}: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
