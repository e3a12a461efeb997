"""Tests say behaviour in short names, and ask objects for what they show."""

import ast

import pytest

from tests.support.paths import ROOT

LONGEST = 60  # letters of a test's name
MOST_PRIVATE = 80  # uses of another object's private attribute, in all tests
# Of named tuples, and of the protocols of others: public, in spite of their underscore.
PUBLIC = {"_replace", "_fields", "_asdict", "_make", "_exit", "_repr_html_"}


def long_names(tree):
    """Names of tests that are sentences."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = [node.name for node in ast.walk(tree) if isinstance(node, functions)]
    return [name for name in names if name.startswith("test_") and len(name) > LONGEST]


def private_uses(tree):
    """The private attributes that are read or set of objects which are not `self`."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr[0] == "_" != node.attr[1]
        and node.attr not in PUBLIC
        and ast.unparse(node.value) not in ("self", "cls")
    ]


@pytest.fixture(scope="module")
def trees():
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8")) for path in paths}


def test_names_of_tests_are_short(trees):
    assert len(trees) > 300
    assert {path: found for path, tree in trees.items() if (found := long_names(tree))} == {}


def test_few_tests_look_at_private_attributes(trees):
    uses = {path: found for path, tree in trees.items() if (found := private_uses(tree))}
    assert sum(map(len, uses.values())) <= MOST_PRIVATE, uses


def test_long_names_and_private_uses_are_seen():
    """The control."""
    name = "test_" + "a" * LONGEST
    source = f"def {name}(self):\n    self._a = b._c.d + e._replace()\n    f().__g__.h._i()\n"
    tree = ast.parse(source)
    assert long_names(tree) == [name]
    assert sorted(private_uses(tree)) == ["b._c", "f().__g__.h._i"]
