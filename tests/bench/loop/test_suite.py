"""The loop's benchmark: all contenders do equal work, and a wrong one is caught."""

import numpy as np
import pytest

from bench.loop import consumer, rig, setups, suite
from bench.loop.suite import GREEDY, K0, K20, OFF, ONE
from ipc import wire
from jax_specdec.checkpoint.model_config import ModelConfig
from tests.support.random_params import random_params

MODEL = ModelConfig.tiny(vocab_size=64)
SETUP = setups.Setup("a test's model", lambda: (random_params(MODEL), MODEL), 3, 2, 1, requests=16)
ON_CPU = [one for one in GREEDY if one.kernel != "separate"]


@pytest.mark.slow
def test_only_what_was_asked_for_travels_and_fixed_messages_do_not_shrink():
    found = suite.measure("a test", SETUP, ON_CPU, random_params(MODEL), MODEL)
    figures = found.figures
    size = {name: row["bytes"] for name, row in figures.items()}
    rows = {name: row["rows"] for name, row in figures.items()}
    assert rows[OFF] == 0
    assert rows[ONE] < rows[K20] / 8  # of 16 requests
    tokens = figures[K20]["tokens/s"] * found[K20].median
    assert rows[K20] == pytest.approx(tokens)  # a row for each token, none for rejected drafts
    assert size[OFF] < size[K0] < size["K = 5"] < size[K20]
    always = wire.HEADER_WORDS + SETUP.requests * wire.SLOT_WORDS + tokens
    for name, k in ((OFF, 0), (K0, 0), ("K = 5", 5), (K20, 20), (ONE, 20)):
        words = always + rows[name] * 2 * (k + 1)
        assert size[name] == pytest.approx(wire.WORD_BYTES * words), name
    assert size["K = 20, fixed-size message"] == rig.FIXED_BYTES
    for name in ("K = 20, naive kernel", "K = 20, objects in dicts"):
        assert size[name] == size[K20]


@pytest.mark.fast
def test_the_parts_of_the_host_time_add_up_to_it():
    """Sending goes on after the consumer has the bytes: that time is counted once."""
    span = {"ready": 9_000, "sent": 11_000, "published": 18_000, "dispatch": 4_000}
    table = np.zeros((3, 8), np.int64)  # two steps as they ran, and this one
    table[2, [consumer.RECEIVED, consumer.DECODED, consumer.PROCESSED]] = 15_000, 19_000, 25_000
    found = rig._steps(1.0, np.zeros(2, np.int64), table, 0, [span])
    parts = [found[f"part: {part} us"] for part in ("copy", "ring", "decode", "process")]
    assert parts == pytest.approx([2, 4, 4, 6])
    assert sum(parts) == pytest.approx(found["host us"])
    assert found["worker us"] == pytest.approx(13)  # launching the message, and publishing it
