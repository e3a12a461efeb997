"""Names of tests on the site's pages: small, and linked to where the tests stand.

A page says `[test_ring::test_it_wraps, ptx::ties]` behind what these tests pin, or has a column of
tests.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import metadata
from pathlib import Path

NAME = r"(?:test_\w+(?:::\w+)+|ptx::\w+)"
# A list in brackets, or alone in a cell of a table; in backquotes a name stays as it is.
NAMES = re.compile(rf"(?<![`\w/])\[?({NAME}(?:,\s+{NAME})*)\]?(?![`\w])")
PTX = "tests/pallas_kernels/mosaic_gpu/ptx"


def places_of_tests(root: Path) -> dict[str, str]:
    """Where each test stands, by `module::name`: its file below `root`, and its line."""
    places = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name, line in _definitions(ast.parse(path.read_text("utf-8")).body):
            places[f"{path.stem}::{name}"] = f"{path.relative_to(root)}#L{line}"
    return places


def _definitions(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
            yield from ((f"{node.name}::{name}", line) for name, line in _definitions(node.body))
        elif isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Name)]
            yield from ((target.id, node.lineno) for target in targets)


def repository() -> str:
    """The address of the files of the newest version, as the package's metadata has it."""
    urls = metadata("jax-specdec").get_all("Project-URL") or []
    (address,) = [url.partition(", ")[2] for url in urls if url.startswith("Repository, ")]
    return f"{address}/blob/main"


def with_links(text: str, places: Mapping[str, str], address: str) -> str:
    """A page's text with each list of tests as small links; a case of PTX leads to all of these."""

    def link(name: str) -> str:
        place = PTX if name.startswith("ptx::") else places[name]
        return f"[{name.partition('::')[2]}]({address}/{place})"

    def small(match: re.Match[str]) -> str:
        links = ", ".join(map(link, re.split(r",\s+", match[1])))
        return f'<small class="tests">{links}</small>'

    return NAMES.sub(small, text)
