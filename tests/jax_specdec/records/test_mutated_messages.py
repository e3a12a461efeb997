"""The short form of tests/heavy/mutated_messages.py, and a control that it can fail."""

import numpy as np
import pytest

from tests.heavy import mutated_messages


def test_thirty_thousand_mutated_messages_are_decoded_equal_or_refused():
    result = mutated_messages.run(30_000)
    assert result.refused > 15_000
    assert result.decoded - result.unchanged > 1_000
    assert result.growth_kib < 20_000


def test_a_decoder_that_skips_its_checks_is_noticed(monkeypatch):
    monkeypatch.setattr("jax_specdec.records.decode._HEADER_BITS", ())
    with pytest.raises(AssertionError, match="seed 0"):
        mutated_messages.run(30_000)


def test_good_messages_survive_the_round_trip():
    rng = mutated_messages.random.Random(1)
    for _ in range(200):
        data = mutated_messages.good_message(rng)
        message = mutated_messages.decode(data)
        assert mutated_messages.encoded_again(message) == data
        assert np.isfinite(message.logprobs).all()
