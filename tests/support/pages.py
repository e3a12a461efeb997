"""The pages of the documentation, and the Python that stands in them."""

import re
from pathlib import Path

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Python, and what it prints.
PAIR = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"-?\d+\.\d*")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def same(printed: str, shown: str) -> bool:
    """Equal except for numbers with a decimal point, which may differ by rounding."""
    if NUMBER.sub("0.", printed).split() != NUMBER.sub("0.", shown).split():
        return False
    numbers = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(abs(float(a) - float(b)) < 0.02 for a, b in numbers)


def python_blocks(page: Path) -> list[str]:
    """The Python of a page, a block each."""
    return blocks(page.read_text(encoding="utf-8"), "python")
