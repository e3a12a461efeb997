"""The pages and README: their Python runs and prints what stands below it, their links lead
somewhere, what they name exists.
"""

import json
import re
import sys

import pytest

from tests.support.pages import DOCS, PAGES, PAIR, python_blocks, same
from tests.support.paths import ROOT
from tests.support.run_examples import run

sys.path.insert(0, str(ROOT / "docs"))
from linked_tests import places_of_tests

# These pages' blocks are run by tests that have what they need.
RUN_ELSEWHERE = {
    "README.md": "test_pages::test_a_block_prints_what_stands_below_it",
    "engine.md": "test_scheduling::test_the_documented_example_runs",
}
RUN_HERE = [page for page in PAGES if page.name not in RUN_ELSEWHERE and python_blocks(page)]
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")
TEST = re.compile(r"\b(?:test_\w+(?:::\w+)+|ptx::\w+)")  # or a word of a case executed as PTX


def existing_tests():
    return {
        name for name in places_of_tests(ROOT) if name.split("::")[-1].startswith(("test_", "Test"))
    } | {
        f"ptx::{word}"
        for path in (ROOT / "tests/pallas_kernels/mosaic_gpu/ptx").glob("*cases.py")
        for name in re.findall(r"lambda: \w+\(\s*\"([^\"]+)\"", path.read_text())
        for word in re.findall(r"\w+", name)
    }


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, capsys):
    """In the order of the page, each block after those above it; it prints what stands below."""
    scope = {"__name__": "__main__"}
    shown = dict(PAIR.findall(page.read_text()))
    for code in python_blocks(page):
        exec(compile(code, page.name, "exec"), scope)
        printed = capsys.readouterr().out
        assert same(printed, shown.get(code, printed)), code


def anchors(text):
    """The anchors of a page's headings, as GitHub and the documentation site make them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(page, tests):
    """What a page names and is not there: links to files and headings, full paths, tests."""
    text, found = page.read_text(), []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    tops = "examples|tests|bench|ipc|jax_specdec|pallas_kernels|docs"
    paths = re.findall(rf"(?<![\w/.])(?:{tops})(?:/\w+)+\.(?:py|md|txt)", text)
    found += [path for path in paths if not (ROOT / path).exists()]
    return found + sorted({*TEST.findall(text)} - tests)


def test_what_a_page_names_exists():
    tests = existing_tests()
    assert {page.name: found for page in PAGES if (found := dead(page, tests))} == {}
    assert set(RUN_ELSEWHERE.values()) <= tests


def test_what_does_not_exist_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`: c\n[a](page.md) [b](#a-b-c) [c](gone.md) [d](#gone) [e](page.md#no)\n"
        "docs/conf.py docs/gone.py [test_pages::test_what_a_page_names_exists, test_a::test_b]"
    )
    tests = existing_tests()
    gone = ["gone.md", "#gone", "page.md#no", "docs/gone.py", "test_a::test_b"]
    assert dead(page, tests) == gone


def test_every_statement_of_the_contract_names_its_tests():
    text = re.sub(r"\n +(?=\S)", " ", (DOCS / "semantics.md").read_text())
    statements = [line for line in text.splitlines() if line.startswith("- ")]
    assert len(statements) > 70
    served = [line for line in statements if "not served yet" not in line.lower()]
    assert [line for line in served if not TEST.search(line)] == []


# Runs the blocks that it reads in one namespace; writes what each printed, or how it failed.
RUN = """
import contextlib, io, json, sys, traceback
printed, scope = [], {"__name__": "__main__"}
for code in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(code, scope)
        except Exception as error:
            print(*traceback.format_exception_only(error), sep="", end="")
    printed.append(out.getvalue())
print(json.dumps([printed, "jax" in sys.modules]))
"""


# The sections that have Python: (code, the output that stands below it), ... by heading.
SECTIONS = {
    section.partition("\n")[0]: PAIR.findall(section)
    for section in re.split(r"^## ", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[1:]
    if PAIR.search(section)
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_block_prints_what_stands_below_it(heading):
    codes, shown = zip(*SECTIONS[heading], strict=True)
    printed, has_jax = json.loads(run("-c", RUN, json.dumps(codes)))
    for one, other in zip(printed, shown, strict=True):
        assert same(one, other), one
    assert ("Error: " in printed[1]) == (heading != "The sampler of your decoding loop")
    assert has_jax == ("pallas_kernels" in codes[0])
