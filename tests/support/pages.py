"""The pages of the documentation, and the Python that stands in them."""

import re
from pathlib import Path

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def python_blocks(page: Path) -> list[str]:
    """The Python of a page, a block each."""
    return blocks(page.read_text(encoding="utf-8"), "python")
