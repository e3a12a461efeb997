"""The bytes of docs/wire.md and the figures of docs/limits.md are the code's."""

import importlib
import re

import pytest

from ipc import wire
from jax_specdec.engine import EngineConfig, SamplingParams
from jax_specdec.engine.errors import RequestError
from jax_specdec.ray import RayConfig
from tests.support.pages import DOCS

pytestmark = pytest.mark.fast


def cells(page, heading):
    """The rows of the table below a heading of a page, without backquotes."""
    section = (DOCS / page).read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def value(cell):
    return eval(cell, {"__builtins__": {}})  # "2**31 - 1"


def test_limits_are_what_the_page_says():
    for place, said, *_ in cells("limits.md", "Values") + cells("limits.md", "Buckets"):
        path, _, name = place.partition("::")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert getattr(module, name) == value(said), place
    for name, largest in cells("limits.md", "Fields of a message"):
        assert (wire.HEADER | wire.SLOT)[name].maximum == value(largest)


def make(place, number):
    kind, _, name = place.partition(".")
    if kind == "EngineConfig":
        return EngineConfig(vocab_size=300, **{name: number})
    if kind == "RayConfig":
        return RayConfig(**{name: number})
    return SamplingParams(**{name: number})


@pytest.mark.parametrize("row", cells("limits.md", "Ranges of settings"), ids=lambda row: row[0])
def test_a_setting_ends_where_the_page_says(row):
    place, low, high = row[0], value(row[1]), value(row[2])
    for number in (low, high):
        make(place, number)
    for number in (low - 1, high + 1):
        with pytest.raises((RequestError, ValueError), match=re.escape(str(number))):
            make(place, number)
