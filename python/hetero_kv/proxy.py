"""``python -m hetero_kv.proxy``: finds the executable ``hetero-kv-proxy`` and becomes it.

Every option is the executable's own; nothing is mirrored here.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def executable(name: str) -> Path:
    """An executable of this wheel; raises ``FileNotFoundError`` that says where it was looked
    for."""
    places = [Path(sysconfig.get_path("scripts")) / name, Path(sys.executable).parent / name]
    for place in places:
        if place.is_file():
            return place
    found = shutil.which(name)
    if found:
        return Path(found)
    looked = ", ".join(str(place) for place in dict.fromkeys(places))
    raise FileNotFoundError(f"{name} is neither at {looked} nor on PATH; install hetero_kv again")


def main() -> None:
    """Replaces this process by the proxy."""
    path = executable("hetero-kv-proxy")
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    main()
