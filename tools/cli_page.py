"""``docs/cli.md``: the help of both executables, as they print it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

EXECUTABLES = ("hetero-kv", "hetero-kv-proxy")
TIMEOUT_S = 20
DEPTH_MAX = 3


class PageError(Exception):
    """An executable is not there or does not print its help."""


def executable(name: str, root: Path) -> Path:
    """The one installed beside this interpreter, else that of PATH, else the last build here."""
    beside = Path(sys.executable).parent / name
    for path in (beside, shutil.which(name), root / "target" / "release" / name):
        if path is not None and Path(path).exists():
            return Path(path)
    raise PageError(f"{name} is not installed beside {sys.executable} (pip install .)")


def help_of(path: Path, words: tuple[str, ...]) -> str:
    """What ``help WORDS`` prints, independent of this terminal and its environment."""
    done = subprocess.run(
        [path, "help", *words],
        env={"COLUMNS": "100"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0 or not done.stdout.strip():
        raise PageError(f"{path.name} help {' '.join(words)}: {done.stderr.strip()}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def subcommands(text: str) -> list[str]:
    """Names under ``Commands:``, but for ``help``."""
    found = re.search(r"^Commands:\n((?:[ ]+.*\n?|\n(?=[ ]))*)", text, re.MULTILINE)
    if found is None:
        return []
    names = re.findall(r"^  ([a-z][\w-]*)(?:\s|$)", found[1], re.MULTILINE)
    return [name for name in names if name != "help"]


def sections(path: Path, name: str, words: tuple[str, ...] = ()) -> Iterator[str]:
    """A command's help, then its subcommands'."""
    text = help_of(path, words)
    title = " ".join((name, *words))
    yield f"{'#' * min(2 + len(words), 4)} `{title}`\n\n```text\n{text}\n```\n"
    if len(words) < DEPTH_MAX:
        for subcommand in subcommands(text):
            yield from sections(path, name, (*words, subcommand))


def page(root: Path, made_by: str) -> str:
    """The whole page."""
    lines = [
        made_by,
        "# Command line",
        "",
        "What `hetero-kv` and `hetero-kv-proxy` print with `--help`. Exit 0: all right; 1: a "
        "mismatch, a leak or a failed check; 2: usage or a refusal.",
        "",
    ]
    for name in EXECUTABLES:
        lines += sections(executable(name, root), name)
    return "\n".join(lines)
