"""Generated documents are current, and every promise of the contract names a test that exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_kv._metrics import METRICS
from hetero_kv.config import SETTINGS

ROOT = Path(__file__).resolve().parents[2]


def test_generated_documents_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gen_docs.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_setting_and_metric_is_documented() -> None:
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for setting in SETTINGS:
        assert f"| `{setting.name}` |" in configuration
    for metric in METRICS:
        assert f"| `{metric.name}{'_total' * (metric.kind == 'counter')}` |" in metrics


def test_the_contract_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "vllm-contract.md").read_text(encoding="utf-8")
    tests = {
        name
        for folder in ("vllm", "unit")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) > 30
    assert named - tests == set()


@pytest.mark.parametrize("name", ["test_contract_hooks", "test_contract_reports"])
def test_every_test_of_vllms_own_behaviour_is_in_the_contract(name: str) -> None:
    text = (ROOT / "docs" / "vllm-contract.md").read_text(encoding="utf-8")
    code = (ROOT / "tests" / "vllm" / f"{name}.py").read_text(encoding="utf-8")
    for test in re.findall(r"^def (test_\w+)", code, re.MULTILINE):
        assert f"`{test}`" in text, test
