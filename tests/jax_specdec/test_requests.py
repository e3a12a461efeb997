"""What a request may ask for."""

import pytest

from jax_specdec.requests import RequestError, SamplingParams

pytestmark = pytest.mark.fast


def test_a_request_may_name_128_chosen_ids_and_ask_for_k_up_to_512():
    params = SamplingParams(logprobs=512, extra_token_ids=tuple(range(128)))
    assert (params.num_columns, len(params.extra_token_ids)) == (513, 128)
    with pytest.raises(RequestError, match="129 extra_token_ids; a request may name 128"):
        SamplingParams(logprobs=0, extra_token_ids=tuple(range(129)))
    with pytest.raises(RequestError, match="logprobs = 513"):
        SamplingParams(logprobs=513)
