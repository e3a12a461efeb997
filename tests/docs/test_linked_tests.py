"""Lists of tests on a page become small links to where the tests stand."""

import sys

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from linked_tests import NAMES, places_of_tests, repository, with_links


def test_tests_and_methods_and_aliases_have_places(tmp_path):
    path = tmp_path / "tests/a/test_ring.py"
    path.parent.mkdir(parents=True)
    path.write_text("def test_a(): ...\n\nclass TestB:\n    def test_c(self): ...\n\ntest_d = 1\n")
    assert places_of_tests(tmp_path) == {
        "test_ring::test_a": "tests/a/test_ring.py#L1",
        "test_ring::TestB": "tests/a/test_ring.py#L3",
        "test_ring::TestB::test_c": "tests/a/test_ring.py#L4",
        "test_ring::test_d": "tests/a/test_ring.py#L6",
    }


def test_lists_of_tests_become_small_links():
    places = {"test_a::test_b": "tests/test_a.py#L3", "test_a::TestC::test_d": "tests/test_a.py#L9"}
    text = "- It holds. [test_a::test_b,\n  test_a::TestC::test_d, ptx::ties]\n[a](b.md) `x[0]`"
    assert with_links(text, places, "R") == (
        '- It holds. <small class="tests">[test_b](R/tests/test_a.py#L3), '
        "[TestC::test_d](R/tests/test_a.py#L9), "
        "[ties](R/tests/pallas_kernels/mosaic_gpu/ptx)</small>\n[a](b.md) `x[0]`"
    )
    cell = "| a | test_a::test_b | `test_a::test_b` |"
    link = '<small class="tests">[test_b](R/tests/test_a.py#L3)</small>'
    assert with_links(cell, places, "R") == f"| a | {link} | `test_a::test_b` |"
    with pytest.raises(KeyError, match="test_a::test_gone"):
        with_links("[test_a::test_gone]", places, "R")


def test_every_test_of_the_contract_has_a_link():
    text = (ROOT / "docs/semantics.md").read_text("utf-8")
    linked = with_links(text, places_of_tests(ROOT), repository())
    assert linked.count(f"]({repository()}/tests/") > 500
    assert NAMES.search(linked) is None
