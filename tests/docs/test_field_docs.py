"""Each field of the doors' named tuples says what it is, and the site shows it."""

import importlib
import sys
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from field_docs import field_docs

pytestmark = pytest.mark.fast
DOORS = (
    "jax_specdec.engine", "jax_specdec.export", "jax_specdec.device", "jax_specdec.device.drafting",
    "pallas_kernels", "pallas_kernels.sampling", "ipc",
)  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_every_field_of_a_door_is_explained(door):
    module = importlib.import_module(door)
    values = [getattr(module, name) for name in module.__all__]
    for cls in values:
        if isinstance(cls, type) and hasattr(cls, "_fields"):
            assert {*cls._fields} <= field_docs(cls).keys(), cls


class Pair(NamedTuple):
    """Two numbers and a word.

    Attributes:
      first, second: numbers,
        in this order.
    """

    first: int
    second: int  # not this
    # What is said
    # above it.
    word: str = "a"
    unsaid: int = 0


def test_texts_come_from_docstrings_and_comments():
    both = "numbers, in this order."
    found = {"first": both, "second": both, "word": "What is said above it."}
    assert field_docs(Pair) == found
