"""docs/reference: every public name is on one page, as its docstring says. No torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from ._checkout import ROOT, tool
from .static.project import PACKAGE

pytestmark = pytest.mark.static

MODULES = {"checkpoint", "integrations", "layers", "moe", "muon", "tensor_parallel"}
SOURCE = '''
from torch import Tensor


class Base:
    def step(self, closure=None) -> Tensor:
        """Go on.

        Args:
            closure: computes the loss, with
                gradients.
            first, second (int): numbers.

        It comes last.
        """

    def _own(self): ...


class Thing(Base):
    """A thing.

        a formula

    Args:
        x: (T, H).

    Raises:
        ValueError, TypeError: x is wrong.

    Source: arXiv 1.
    """

    def __init__(
        self,
        x: Tensor,  # (T, H)
    ) -> None:
        ...
'''


@pytest.fixture
def reference():
    return tool("reference_pages")


@pytest.mark.parametrize("module", ["", "moe", "integrations", "layers", "tensor_parallel"])
def test_every_public_name_is_on_one_page(reference, module: str) -> None:
    path = PACKAGE / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    listed = [
        name for page in reference.PAGES.values() if page.module == module for name in page.names
    ]
    public = set(tool("hub_card").read_all(path)) - MODULES
    assert sorted(listed) == sorted(public)


def test_a_page_is_written_from_source(reference, tmp_path: Path) -> None:
    package = tmp_path / reference.PACKAGE
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .inner import Thing\n")
    (package / "inner/__init__.py").write_text("from .thing import Thing\n")
    (package / "inner/thing.py").write_text(SOURCE)
    page = reference.Page("Things", "", ("Thing",), ("step",))
    text = reference.render(page, reference.Sources(package))
    for part in (
        "# Things\n\n`opt` is what ",
        "## Thing\n\n```\nopt.Thing(\n    x: Tensor,  # (T, H)\n)\n```\n\nA thing.",
        "A thing.\n\n```\na formula\n```",
        "**Args**\n\n- `x`: (T, H).",
        "**Raises**\n\n- `ValueError`, `TypeError`: x is wrong.\n\nSource: arXiv 1.",
        "## step\n\n```\n.step(closure=None) -> Tensor\n```\n\nGo on.",
        "- `closure`: computes the loss, with gradients.\n- `first`, `second`: numbers.",
        "numbers.\n\nIt comes last.",
    ):
        assert part in text, text


def test_a_stale_page_and_a_left_one_are_found(reference, monkeypatch, tmp_path: Path) -> None:
    pages = {reference.FOLDER / name: "text\n" for name in ("a.md", "b.md")}
    monkeypatch.setattr(reference, "rendered", lambda root: pages)
    (tmp_path / reference.FOLDER).mkdir(parents=True)
    (tmp_path / reference.FOLDER / "a.md").write_text("text\n")
    (tmp_path / reference.FOLDER / "c.md").write_text("text\n")
    assert reference.stale(tmp_path) == [reference.FOLDER / name for name in ("b.md", "c.md")]


def test_no_page_is_empty(reference) -> None:
    for path, text in reference.rendered(ROOT).items():
        assert text.startswith("# ") and "\n```\n```\n" not in text, path
        assert not text.rstrip().endswith((":", "```\n")), path
