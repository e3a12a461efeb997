"""The bytes of docs/wire.md and the figures of docs/limits.md are the code's."""

import importlib
import re
from functools import partial

import numpy as np
import pytest

from ipc import wire
from jax_specdec.engine import EngineConfig, SamplingParams, decode
from jax_specdec.engine.errors import RequestError
from jax_specdec.ray import RayConfig
from tests.support.pages import DOCS, cells, python_blocks, rows_of


def value(cell):
    return eval(cell, {"__builtins__": {}})  # "2**31 - 1"


def test_the_bytes_of_the_page_are_a_message():
    data = b""
    for offset, part, _ in cells("wire.md", "One message, byte by byte"):
        assert len(data) == int(offset)
        data += bytes.fromhex(part.replace("`", " "))
    message = decode(data)
    assert (message.kind, message.step, message.max_num_logprobs) == (wire.Kind.TARGET, 7, 1)
    assert (message.running, message.draft_follows, message.process_rank) == (True, False, 0)
    assert message.generation.tolist() == [3, 1]
    assert message.num_drafts.tolist() == [2, 0]
    first, second = message.slot(0), message.slot(1)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([11, 42], [7])
    assert first.token_ranks.tolist() == [1, 2]
    np.testing.assert_array_equal(first.logprobs, np.float32([[-0.25, -0.25], [-1.5, -0.5]]))
    assert first.topk_ids.tolist() == [[11], [9]]
    assert first.kept is None
    assert (second.kept.log_kept.tolist(), second.kept.ids(0).tolist()) == ([-0.25], [7, 9])
    scope = {}
    exec(python_blocks(DOCS / "wire.md")[0], scope)
    assert scope["data"] == data


@pytest.mark.parametrize(("name", "fields"), [("header", wire.HEADER), ("slot", wire.SLOT)])
def test_the_fields_of_the_page_are_the_layouts(name, fields):
    section = (DOCS / "wire.md").read_text().split(f"| {name} | word |", 1)[1]
    rows = rows_of(section.split("\n\n", 1)[0])[1:]
    said = {row[0]: (int(row[1]), *map(int, row[2].split("-"))) for row in rows}
    assert said == {
        field: (at.word, at.shift, at.shift + at.bits - 1) for field, at in fields.items()
    }


def test_limits_are_what_the_page_says():
    for place, said, *_ in cells("limits.md", "Values") + cells("limits.md", "Buckets"):
        path, _, name = place.partition("::")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert getattr(module, name) == value(said), place
    for name, largest in cells("limits.md", "Fields of a message"):
        assert (wire.HEADER | wire.SLOT)[name].maximum == value(largest)


KINDS = {
    "EngineConfig": partial(EngineConfig, vocab_size=300),
    "RayConfig": RayConfig,
    "SamplingParams": SamplingParams,
}


@pytest.mark.parametrize("row", cells("limits.md", "Ranges of settings"), ids=lambda row: row[0])
def test_a_setting_ends_where_the_page_says(row):
    kind, _, name = row[0].partition(".")
    low, high = map(value, row[1:3])
    for number in (low, high):
        KINDS[kind](**{name: number})
    for number in (low - 1, high + 1):
        with pytest.raises((RequestError, ValueError), match=re.escape(str(number))):
            KINDS[kind](**{name: number})
