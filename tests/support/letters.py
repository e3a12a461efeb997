"""Grammars of a few letters, and what they allow by a list of all of their words."""

import functools
import itertools

import numpy as np

from jax_specdec.requests import Structured
from jax_specdec.structured.vocabulary import vocabulary_of

LETTERS = "abcdefghijklmnopqrstuvwxyz0123"  # ids 0 to 29
OTHER, END = 30, 31  # no letters; END ends texts
WORDS = tuple(
    "".join(parts) + "3"
    for count in range(1, 5)
    for parts in itertools.product(("ab", "cde", "f0", "ac"), repeat=count)
)
WORDS_PATTERN = Structured("regex", "(ab|cde|f0|ac){1,4}3")


@functools.cache
def vocabulary():
    """The tokens of a vocabulary of 32."""
    names = [*LETTERS, "<other>", "<end>"]
    return vocabulary_of([name.encode() for name in names], [OTHER, END])


def text_of(token_ids):
    return "".join(LETTERS[one] for one in token_ids if one < OTHER)


@functools.cache
def beginnings(words=WORDS):
    """Beginning to the tokens behind it: letters of words, END behind a whole one."""
    found = {}
    for word in words:
        for place, letter in enumerate(word):
            found.setdefault(word[:place], set()).add(LETTERS.index(letter))
        found.setdefault(word, set()).add(END)
    return found


def masked(row, emitted, words=WORDS):
    """The logits [V] of the token behind those emitted: -inf for what makes no word."""
    allowed = sorted(beginnings(words)[text_of(emitted)])
    made = np.full(len(row), -np.inf, row.dtype)
    made[allowed] = row[allowed]
    return made
