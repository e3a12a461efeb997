"""The detokenization benchmark compares equal strings, and notices unequal ones."""

import contextlib

import pytest

from bench import detokenize
from bench.timing import BenchError, compare


@pytest.fixture(scope="module")
def tokenizer():
    return detokenize.trained(600, 200_000)


def test_all_contenders_make_the_same_strings(tokenizer):
    found = detokenize.measure(tokenizer, rounds=1, requests=4, k=5)
    assert set(found.names) == {
        detokenize.OURS, detokenize.ENTRIES, detokenize.BATCH, detokenize.EACH,
    }  # fmt: skip
    assert found.targets == ()  # promised for 64 requests and 30,000 ids only
    assert found.settings["vocabulary"] == 600


def test_other_strings_are_noticed(tokenizer):
    table, steps = detokenize.table_of(tokenizer), detokenize.steps_of(tokenizer, 2, 4, 5)
    right = detokenize.ours(table, steps)
    for maker in (
        lambda steps: detokenize.decode_each(tokenizer, steps),
        lambda steps: detokenize.decode_batch(tokenizer, steps),
        lambda steps: detokenize.entries(table, steps),
    ):
        name = detokenize.ENTRIES if "entries" in maker(steps).__qualname__ else detokenize.EACH
        for given, noticed in ((steps, False), (steps[::-1], True)):
            with pytest.raises(BenchError) if noticed else contextlib.nullcontext():
                compare(
                    "x",
                    {detokenize.OURS: right, name: maker(given)},
                    check=detokenize.checker(table, steps),
                    rounds=1,
                )
