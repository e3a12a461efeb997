"""The bytes of docs/wire.md and the figures of docs/limits.md are the code's."""

import ast
import importlib
import re

import numpy as np
import pytest

from ipc import wire
from jax_specdec.device.messages.buckets import k_bucket, words_bucket
from jax_specdec.engine import EngineConfig, SamplingParams, decode
from jax_specdec.engine.errors import RequestError
from jax_specdec.ray import RayConfig
from tests.support.pages import DOCS, python_blocks
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast

PACKAGES = ("ipc", "pallas_kernels", "jax_specdec")


def cells(text, heading):
    """The rows of the table below `## heading`, without backquotes."""
    section = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def value(cell):
    return eval(cell, {"__builtins__": {}})  # "2**31 - 1"


def limits():
    return (DOCS / "limits.md").read_text()


# The message of wire.md, byte by byte.


def bytes_of_page():
    """[(offset, bytes)] of the table's rows."""
    rows = cells((DOCS / "wire.md").read_text(), "One message, byte by byte")
    return [(int(offset), bytes.fromhex(data.replace("`", " "))) for offset, data, _ in rows]


def test_the_bytes_of_the_page_are_a_message():
    rows = bytes_of_page()
    data = b"".join(part for _, part in rows)
    for offset, part in rows:
        assert data[offset : offset + len(part)] == part
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


def test_a_byte_that_is_not_the_pages_is_noticed():
    data = bytearray(b"".join(part for _, part in bytes_of_page()))
    data[36] = 3  # one token more
    with pytest.raises(wire.WireError):
        decode(bytes(data))


@pytest.mark.parametrize(("name", "fields"), [("header", wire.HEADER), ("slot", wire.SLOT)])
def test_the_fields_of_the_page_are_the_layouts(name, fields):
    section = (DOCS / "wire.md").read_text().split("## Fields\n", 1)[1]
    table = section.split(f"| {name} | word |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    rows = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in table]
    said = {row[0]: (int(row[1]), *map(int, row[2].split("-"))) for row in rows}
    assert said == {
        field: (at.word, at.shift, at.shift + at.bits - 1) for field, at in fields.items()
    }


# The figures of limits.md.


def constants():
    """`path::NAME` of every limit that a shipped module defines."""
    found = set()
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            for target in ast.walk(ast.Module(node.targets, [])):
                if isinstance(target, ast.Name) and is_limit(target.id):
                    found.add(f"{path.relative_to(ROOT)}::{target.id}")
    return found


def is_limit(name):
    return bool(re.fullmatch(r"MAX_\w+|\w+_BUCKETS|MIN_(TEMPERATURE|CAPABILITY|VOCABULARY)", name))


def said_constants():
    text = limits()
    return {
        row[0]: value(row[1]) for heading in ("Values", "Buckets") for row in cells(text, heading)
    }


def test_every_limit_of_the_code_is_on_the_page():
    assert said_constants().keys() == constants()
    assert is_limit("MAX_TOP_K")
    assert is_limit("K_BUCKETS")
    assert not is_limit("SLICE_NS")


def test_the_buckets_are_those_of_the_page():
    table = re.search(r"```text\n(words of .*?)```", limits(), re.DOTALL)[1]
    rows = [re.split(r" {3,}", line) for line in table.splitlines() if line]
    words, copied, asked, large, small = ([int(cell) for cell in row[1:]] for row in rows)
    assert [words_bucket(number) for number in words] == copied
    assert [k_bucket(k, 50_000) for k in asked[:-1]] == large
    assert [k_bucket(asked[-1], 30)] == small


@pytest.mark.parametrize("place", sorted(said_constants()))
def test_a_limit_is_what_the_page_says(place):
    path, _, name = place.partition("::")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert getattr(module, name) == said_constants()[place]


def make(place, number):
    kind, _, name = place.partition(".")
    if kind == "EngineConfig":
        return EngineConfig(vocab_size=300, **{name: number})
    if kind == "RayConfig":
        return RayConfig(**{name: number})
    return SamplingParams(**{name: number})


@pytest.mark.parametrize("row", cells(limits(), "Ranges of settings"), ids=lambda row: row[0])
def test_a_setting_ends_where_the_page_says(row):
    place, low, high = row[0], value(row[1]), value(row[2])
    for number in (low, high):
        make(place, number)
    for number in (low - 1, high + 1):
        with pytest.raises((RequestError, ValueError), match=re.escape(str(number))):
            make(place, number)


def test_the_fields_limits_are_the_layouts():
    fields = wire.HEADER | wire.SLOT
    rows = cells(limits(), "Fields of a message")
    assert len(rows) == 10
    for name, largest in rows:
        assert fields[name].maximum == value(largest)
        with pytest.raises(wire.WireError, match=name):
            wire.fits(name, value(largest) + 1, fields[name])
