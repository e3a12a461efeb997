"""Every line of the contract names tests that exist; every place that the docs name exists too."""

import re

import pytest

from tests.support.existing_tests import definitions, existing_tests
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast

SECTIONS = [
    "Rows",
    "Logprobs",
    "Penalties and biases",
    "Logprobs from hidden states",
    "Kept sets",
    "Messages",
    "Drafts",
    "Delivery",
    "Process ranks",
    "Replicas",
    "Transformations of a kernel call",
]
NOT_SERVED = "not served yet"
REFERENCE = re.compile(r"\btest_\w+(?:::\w+)+")
CASE = re.compile(r"\bptx::\w+")  # a word of a case whose kernels are executed as PTX
PLACE = re.compile(r"`(\w+(?:/\w+)+\.py)::([\w.]+)`")


def statements(text):
    """The bullets of a page, each with its continuation lines on one line."""
    found, inside = [], False
    for line in text.splitlines():
        if line.startswith("- "):
            found.append(line[2:])
            inside = True
        elif inside and line.startswith("  "):
            found[-1] += " " + line.strip()
        else:
            inside = False
    return found


def table_rows(text):
    """The cells of every table row; without headings and the lines below them."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {n for n, line in enumerate(lines) if set(line) <= set("|- ")}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for n, line in enumerate(lines)
        if n not in rules and n + 1 not in rules
    ]


def unpinned(lines):
    """Lines that name no test and do not say that they are not served."""
    return [line for line in lines if not REFERENCE.search(line) and NOT_SERVED not in line.lower()]


def missing(text, existing):
    return sorted({*REFERENCE.findall(text), *CASE.findall(text)} - existing)


def missing_places(text):
    """Functions and classes that the text names by file and are not there."""
    return [
        f"{path}::{name}"
        for path, name in PLACE.findall(text)
        if not (ROOT / path).exists()
        or name.replace(".", "::") not in definitions((ROOT / path).read_text())
    ]


def page(name):
    return (ROOT / "docs" / name).read_text()


def test_a_test_file_that_a_page_names_is_the_only_one_of_its_name():
    """Pages name tests as `file::test`, without the folder."""
    names = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    named = {
        reference.partition("::")[0]
        for text in (page("semantics.md"), page("seed_system.md"))
        for reference in REFERENCE.findall(text)
    }
    assert len(named) > 20
    assert [name for name in sorted(named) if names.count(name) != 1] == []


def test_every_statement_of_the_contract_names_its_tests():
    text = page("semantics.md")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    for section in text.split("\n## ")[1:]:
        assert len(statements(section)) >= 4
    assert len(statements(text)) > 70
    assert unpinned(statements(text)) == []
    assert missing(text, existing_tests()) == []


def test_every_behavior_and_trap_of_the_seed_system_has_its_place():
    text = page("seed_system.md")
    rows = table_rows(text)
    assert [row[0][:2] for row in rows if re.match(r"\d\. ", row[0])] == [
        f"{n}." for n in range(1, 9)
    ]
    assert {len(row) for row in rows} == {3}
    assert unpinned([" ".join(row) for row in rows]) == []
    assert missing(text, existing_tests()) == []
    assert len(PLACE.findall(text)) > 40
    assert missing_places(text) == []


def test_these_checks_can_fail():
    existing = existing_tests()
    assert "test_semantics_index::test_these_checks_can_fail" in existing
    assert "test_state_machine::TestMachine" in existing
    assert "test_verify::test_ragged_acceptance" in existing
    text = """
- A line with its test.
  [test_verify::test_shapes_that_do_not_fit_are_refused]
- A line without a test, however
  long it is.
- Not served yet, and it says so.

  | not | a statement |
- The last one. [test_verify::test_of_a_dream, test_dream::test_shapes_that_do_not_fit_are_refused]
  [ptx::fused, ptx::dreamt]
"""
    assert unpinned(statements(text)) == ["A line without a test, however long it is."]
    assert missing(text, existing) == [
        "ptx::dreamt",
        "test_dream::test_shapes_that_do_not_fit_are_refused",
        "test_verify::test_of_a_dream",
    ]
    table = "| a | b |\n| --- | --- |\n| x | `ipc/wire.py::layout` |\n| y | `ipc/wire.py::dream` |"
    assert table_rows(table) == [["x", "`ipc/wire.py::layout`"], ["y", "`ipc/wire.py::dream`"]]
    assert missing_places(table) == ["ipc/wire.py::dream"]
    skipped = (
        "@pytest.mark.skip\ndef test_a(): ...\ndef test_b(): ...\nclass C:\n  def test_c(): ..."
    )
    assert definitions(skipped) == {"test_b", "C", "C::test_c"}
