"""Docstrings become reStructuredText that says the same; `docs/docstrings.py`."""

import importlib
import inspect
import re
import textwrap

import pytest

from tests.support.doors import NAMES, documented
from tests.support.pages import DOCS, module_at

pytestmark = pytest.mark.fast

to_rst = module_at(DOCS / "docstrings.py").to_rst
LINKS = {"Engine": "jax_specdec.engine.Engine"}


def rst(text):
    return to_rst(textwrap.dedent(text).strip("\n"), LINKS)


def test_code_is_a_literal_and_a_known_name_a_link():
    assert rst("Takes `x * 2`s of an `Engine`.") == (
        "Takes ``x * 2``\\ s of an :py:obj:`Engine <jax_specdec.engine.Engine>`."
    )


def test_what_would_be_markup_is_escaped():
    assert rst("2 * a, |b|, numpy_ and one_name") == r"2 \* a, \|b\|, numpy\_ and one_name"
    assert rst("a `backquote too many") == r"a \`backquote too many"


def test_a_section_has_a_title_and_fields():
    text = """
    Does it.

    Args:
      logits: [N, V], as `Engine`
        has them.
      *rest: more.

    Returns:
      One line
      and another.
    """
    assert rst(text) == textwrap.dedent(
        """
        Does it.

        .. rubric:: Args

        ``logits``
           [N, V], as :py:obj:`Engine <jax_specdec.engine.Engine>` has them.
        ``*rest``
           more.

        .. rubric:: Returns

        One line
        and another.
        """
    ).strip("\n")


def test_fields_need_no_title_but_one_colon_makes_none():
    assert rst("A pair.\n\nfirst: one.\nsecond: two.") == (
        "A pair.\n\n``first``\n   one.\n``second``\n   two."
    )
    assert rst("Note: not a field.") == "Note: not a field."


def test_lists_and_code_stay_what_they_are():
    assert rst("1. One\n   more.\n2. Two.") == "1. One\n   more.\n2. Two."
    assert rst("Use it::\n\n    a = b * c\n\n    d()\n\nEnd.") == (
        "Use it:\n\n::\n\n   a = b * c\n\n   d()\n\nEnd."
    )
    assert rst("Cases:\n  One, which\n    goes on.\n  Two.") == (
        ".. rubric:: Cases\n\n- One, which goes on.\n- Two."
    )


def words(text):
    return re.findall(r"[A-Za-z0-9]+", text.replace(".. rubric::", ""))


@pytest.mark.parametrize("door", NAMES)
def test_no_word_of_a_docstring_is_lost(door):
    for name, found in documented(importlib.import_module(door)).items():
        text = inspect.getdoc(found)
        assert words(to_rst(text, {})) == words(text), name
