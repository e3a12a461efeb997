"""Names say what they hold: those that say how a value came stay few."""

import ast

from tests.support.import_rules import PACKAGES, modules

WORDS = {
    "found", "one", "given", "kept", "own", "left", "whole", "each", "known", "mine", "every",
    "here", "said", "nothing", "asked", "wanted",
}  # fmt: skip
MOST_WHAT = 30  # docstrings that begin so
MOST = 200  # bindings in the three packages; "kept" of kept sets is among them


def bindings(source):
    """The bindings of such a word: as a variable, an argument, a function or a class."""
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, field, None) for field in ("id", "arg", "name")]
        binds = not isinstance(getattr(node, "ctx", None), ast.Load | ast.Del)
        if binds and not isinstance(node, ast.keyword):
            yield from (x for x in names if isinstance(x, str) and x.lstrip("_") in WORDS)


def test_few_names_say_how_a_value_came():
    sources = [path.read_text("utf-8") for path in modules(*PACKAGES).values()]
    assert sum(len([*bindings(source)]) for source in sources) <= MOST


def test_docstrings_open_with_a_noun_or_a_verb():
    """Few say "What ..."."""
    sources = [path.read_text("utf-8") for path in modules(*PACKAGES).values()]
    assert sum(source.count('"""What ') for source in sources) <= MOST_WHAT


def test_each_way_to_bind_a_word_is_seen():
    """The control."""
    source = "def _found(given, *, own=1):\n  one = kept(given, own=2)\n  class here: ...\n"
    assert sorted(bindings(source)) == ["_found", "given", "here", "one", "own"]
