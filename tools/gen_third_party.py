"""Writes THIRD_PARTY.md: every crate linked into the wheel, with its licence and source.

``--check`` writes nothing and exits with 1 when the file is not current.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "THIRD_PARTY.md"
SHIPPED = ("hetero-kv-py", "hetero-kv-cli", "hetero-kv-proxy")
PLATFORM = "x86_64-unknown-linux-gnu"

HEAD = """# Third-party notices

The wheel links these crates, at the versions of `Cargo.lock`. Written by `tools/gen_third_party.py`
(`make docs`).

| crate | version | licence | source |
|---|---|---|---|
"""


def linked_crates() -> list[dict[str, str]]:
    """The crates that the extension and the executables link, by name."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    command += ["--filter-platform", PLATFORM]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    metadata = json.loads(done.stdout)
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    queue = [id_ for id_, package in packages.items() if package["name"] in SHIPPED]
    seen: set[str] = set()
    while queue:
        id_ = queue.pop()
        if id_ in seen:
            continue
        seen.add(id_)
        for dep in nodes[id_]["deps"]:
            # Build and development dependencies are not linked; procedural macros are, as code
            # they have written.
            if any(kind["kind"] is None for kind in dep["dep_kinds"]):
                queue.append(dep["pkg"])
    crates = [packages[id_] for id_ in seen if packages[id_]["source"]]
    return sorted(crates, key=lambda crate: (crate["name"], crate["version"]))


def page() -> str:
    """The whole file."""
    rows = [
        f"| {crate['name']} | {crate['version']} | {crate['license'] or 'see source'} "
        f"| {crate['repository'] or '-'} |\n"
        for crate in linked_crates()
    ]
    return HEAD + "".join(rows)


def main() -> int:
    """Writes or checks the file; the exit code."""
    wanted = page()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != wanted:
            print("THIRD_PARTY.md is not current: run `make docs`", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
