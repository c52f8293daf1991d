"""What all Python tests share. Tests that need vLLM are skipped, with the reason, without it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

# Before anything imports vLLM: it must neither look for models on the network, nor report usage,
# nor advertise another address than loopback.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


def has_vllm() -> bool:
    """Whether vLLM itself is installed; the folder ``tests/vllm`` looks like a package too."""
    return importlib.util.find_spec("vllm.config") is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Modules under ``tests/vllm`` import vLLM at their top, so they are not even read without."""
    if collection_path.suffix == ".py" and "vllm" in collection_path.parts and not has_vllm():
        return collection_path.name.startswith("test_")
    return None


def pytest_report_header() -> str | None:
    """Says what is left out."""
    return None if has_vllm() else "tests/vllm is skipped: vLLM is not installed"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips single tests elsewhere that are marked as needing vLLM."""
    if has_vllm():
        return
    skip = pytest.mark.skip(reason="vLLM is not installed")
    for item in items:
        if item.get_closest_marker("vllm") or item.get_closest_marker("engines"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights, for engines of the contract tests."""
    from contract_engine import write_model_folder

    return write_model_folder(tmp_path_factory.mktemp("model"))
