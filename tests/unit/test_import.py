"""Importing the package costs nothing: no torch, no vLLM, no thread."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    """The code in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_needs_neither_torch_nor_vllm_and_starts_no_thread() -> None:
    assert (
        run(
            "import sys, os, hetero_kv\n"
            "heavy = {'torch', 'vllm', 'prometheus_client', 'numpy'} & set(sys.modules)\n"
            "print(sorted(heavy), len(os.listdir('/proc/self/task')), bool(hetero_kv.__version__))"
        )
        == "[] 1 True"
    )


def test_settings_metrics_and_plugin_need_no_vllm_either() -> None:
    assert (
        run(
            "import sys\n"
            "import hetero_kv.config, hetero_kv._metrics, hetero_kv.plugin, hetero_kv.layout\n"
            "print(sorted({'torch', 'vllm', 'prometheus_client'} & set(sys.modules)))"
        )
        == "[]"
    )


def test_version_is_that_of_the_installed_distribution() -> None:
    assert (
        run(
            "import importlib.metadata as m, hetero_kv\n"
            "print(m.version('hetero_kv') == hetero_kv.__version__)"
        )
        == "True"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert (
        run(
            "import hetero_kv\n"
            "try:\n    hetero_kv.nothing\nexcept AttributeError as error:\n    print(error)"
        )
        == "module 'hetero_kv' has no attribute 'nothing'"
    )
