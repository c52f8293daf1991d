"""PEP 517 backend: builds the executables, stages them for the wheel, then hands over to maturin.

maturin builds either an extension module or a binary. The wheel carries both: files below
``hetero_kv.data/scripts`` are installed into the environment's ``bin``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import maturin
from maturin import (  # noqa: F401  (the hooks that need no staging)
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "hetero_kv.data" / "scripts"
EXECUTABLES = {"hetero-kv-cli": "hetero-kv", "hetero-kv-proxy": "hetero-kv-proxy"}


def _stage_executables() -> None:
    packages = [argument for package in EXECUTABLES for argument in ("-p", package)]
    subprocess.run(["cargo", "build", "--release", "--locked", *packages], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    for name in EXECUTABLES.values():
        shutil.copy2(ROOT / target / "release" / name, SCRIPTS / name)


def build_sdist(sdist_directory, config_settings=None):
    """Builds the sdist, which carries every crate of the workspace."""
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return maturin.build_sdist(sdist_directory, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """The wheel's metadata; maturin wants the data folder to exist even for that."""
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the wheel with both executables in it."""
    _stage_executables()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the editable wheel (``pip install -e .``) with both executables in it."""
    _stage_executables()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)
