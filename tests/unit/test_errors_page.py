"""docs/errors.md is read from the sources, and none of their errors can be left out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCE = """\
/// Why it went wrong. See [`Other`].
///
/// More on it.
#[derive(Debug, thiserror::Error)]
pub enum SomeError {
    /// The name, of which
    /// there is none.
    #[error("no {name}, and \\
             a brace: }}")]
    NoName {
        /// Which.
        name: String,
    },
    /// The one within.
    #[error(transparent)]
    Within(#[from] io::Error),
}

/// Not an error.
pub enum Plain {
    /// A case.
    One,
}
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("errors_page", ROOT / "tools" / "errors_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Data classes look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_an_enum_is_read_with_its_texts(tool: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "rust" / "hetero-kv-core" / "src"
    source.mkdir(parents=True)
    (source / "lib.rs").write_text(SOURCE, encoding="utf-8")
    (found,) = tool.enums(tmp_path)
    assert (found.name, found.meaning) == ("SomeError", "Why it went wrong. See `Other`.")
    assert [(v.name, v.code, v.meaning, v.text) for v in found.variants] == [
        ("NoName", "no_name", "The name, of which there is none.", "no {name}, and a brace: }}"),
        ("Within", "within", "The one within.", "(that of the error within)"),
    ]


def test_a_code_without_advice_and_advice_without_a_code_are_errors(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "| `lease_gone` |" in tool.page(ROOT, "")
    intro, advice = tool.CODES["GoneReason"]
    for wrong in ({**advice, "invented": "x"}, {"expired": "x"}):
        with monkeypatch.context() as patch:
            patch.setitem(tool.CODES, "GoneReason", (intro, wrong))
            with pytest.raises(tool.PageError, match="GoneReason differ in"):
                tool.page(ROOT, "")
    monkeypatch.delitem(tool.ADVICE, "ListenError")
    with pytest.raises(tool.PageError, match="ListenError"):
        tool.page(ROOT, "")
