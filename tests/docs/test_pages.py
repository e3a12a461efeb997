"""The pages: their Python runs, their links lead somewhere, the files they name exist."""

import re

import pytest

from tests.support.existing_tests import existing_tests
from tests.support.pages import DOCS, PAGES, blocks, python_blocks
from tests.support.paths import ROOT

# These pages' blocks are run by tests that have what they need.
RUN_ELSEWHERE = {
    "README.md": "test_readme::test_a_block_prints_what_stands_below_it",
    "engine.md": "test_scheduling::test_the_documented_example_runs",
    "export.md": "test_openai::test_the_examples_of_the_documentation_run",
}
RUN_HERE = [page for page in PAGES if page.name not in RUN_ELSEWHERE and python_blocks(page)]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, capsys):
    """In the order of the page, each block after those above it."""
    scope = {"__name__": "__main__"}
    for code in python_blocks(page):
        exec(compile(code, page.name, "exec"), scope)


def test_there_are_blocks_to_run_and_a_wrong_one_fails(tmp_path, capsys):
    assert len(RUN_HERE) >= 7
    assert set(RUN_ELSEWHERE.values()) <= existing_tests()
    wrong = tmp_path / "wrong.md"
    wrong.write_text("```python\nfound = 1\n```\n\n```python\nassert found == 2\n```\n")
    with pytest.raises(AssertionError):
        test_the_code_of_a_page_runs(wrong, capsys)


def anchors(text):
    """The anchors of a page's headings, as GitHub and the documentation site make them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page):
    """The links of a page to files and headings that do not exist."""
    dead = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_somewhere(page):
    assert dead_links(page) == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n[a](page.md) [b](#a-b-c) [c](gone.md) [d](#gone) [e](page.md#no)")
    assert dead_links(page) == ["gone.md", "#gone", "page.md#no"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_that_a_page_names_exists(page):
    """Full paths; a plain `name.py` belongs to the folder that its page is about."""
    tops = "examples|tests|bench|ipc|jax_specdec|pallas_kernels|docs"
    for path in re.findall(rf"(?<![\w/.])(?:{tops})(?:/\w+)+\.(?:py|md|txt)", page.read_text()):
        assert (ROOT / path).exists(), path


def test_the_pages_are_the_ones_that_a_reader_sees():
    assert {"README.md", "semantics.md", "wire.md"} <= {page.name for page in PAGES}
    assert DOCS.is_dir()
    assert blocks("```text\na\n```\n", "text") == ["a\n"]
