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


def cells(page: str, heading: str) -> list[list[str]]:
    """The rows of the table below a heading of a page, without backquotes."""
    section = (DOCS / page).read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return rows_of(section)[2:]


def rows_of(table: str) -> list[list[str]]:
    """The rows of a table, its heading and the line below it among them."""
    rows = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]
