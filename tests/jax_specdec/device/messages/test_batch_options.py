"""The static limits of what a batch asks for, their buckets, and its arrays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipc.wire import LogprobsMode, WireError
from jax_specdec.device.messages import batch_options
from jax_specdec.requests import SamplingParams

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
V = 7


def test_only_what_the_batch_asks_for_is_compiled():
    def widths(**params):
        return batch_options.widths_of([SamplingParams(), SamplingParams(**params)], V)

    assert widths() == (None, 0, RAW, False, 0)
    assert widths(logprobs=0) == (0, 0, RAW, False, 0)
    assert widths(kept_token_ids=True) == (None, 0, RAW, True, 0)
    assert widths(kept_token_ids=True, logprobs=0) == (0, 0, RAW, True, 0)
    assert widths(logprobs=0, entropy=True) == (0, 0, RAW, False, 1)
    assert widths(logprobs=0, entropy=True, log_sum_exp=True) == (0, 0, RAW, False, 3)
    # Without logprobs there is no mode to compute in.
    assert widths(logprobs_mode=PROCESSED) == (None, 0, RAW, False, 0)
    assert widths(logprobs=3, logprobs_mode=SCALED, extra_token_ids=(1, 2)) == batch_options.Widths(
        5, 16, SCALED
    )
    buckets = {count: batch_options.chosen_bucket(count) for count in (0, 1, 16, 17, 128, 129)}
    assert buckets == {0: 0, 1: 16, 16: 16, 17: 128, 128: 128, 129: 512}
    with pytest.raises(WireError, match="513 chosen token ids"):
        batch_options.chosen_bucket(513)


def test_what_a_batch_asks_for_has_a_row_for_each_request():
    params = [SamplingParams(logprobs=3, extra_token_ids=(4, 2)), SamplingParams(temperature=0.5)]
    widths = batch_options.widths_of(params, V)
    asked = batch_options.options_of_requests(params, widths)
    assert asked.chosen_ids.shape == (2, widths.chosen)
    assert asked.chosen_ids[0, :2].tolist() == [4, 2]
    said = [asked.num_columns, asked.num_chosen, asked.generation, asked.verdict]
    assert [x.tolist() for x in said] == [[4, 0], [2, 0], [1, 1], [0, 0]]
    assert asked.sampling.temperature.tolist() == [0, 0.5]
    assert asked.kept.tolist() == [False, False]
    assert batch_options.options_of_requests(
        params, widths, generation=[7, 9]
    ).generation.tolist() == [7, 9]
    with pytest.raises(ValueError, match="3 generations for 2 requests"):
        batch_options.options_of_requests(params, widths, generation=[7, 8, 9])


@given(st.integers(1, 10**7))
def test_buckets_hold_what_they_must_and_at_most_half_again(num_words):
    assert num_words <= batch_options.words_bucket(num_words) <= 1.5 * num_words


def test_buckets_are_few():
    assert len({batch_options.words_bucket(n) for n in range(50, 20_000)}) < 20
    sizes = {k: batch_options.k_bucket(k, 1000) for k in (0, 1, 5, 6, 20, 21, 128, 129, 257)}
    assert sizes == {0: 0, 1: 5, 5: 5, 6: 20, 20: 20, 21: 64, 128: 128, 129: 256, 257: 512}
    assert batch_options.k_bucket(4, 4) == 4
    with pytest.raises(WireError, match="513"):
        batch_options.k_bucket(513, 1000)


def test_more_columns_than_tokens_are_refused():
    assert batch_options.widths_of([SamplingParams(logprobs=V)], V).k == V
    with pytest.raises(ValueError, match=rf"logprobs = {V + 1} .* ask for {V} at most"):
        batch_options.widths_of([SamplingParams(), SamplingParams(logprobs=V + 1)], V)
