"""What a request may ask for."""

import pytest

from jax_specdec.requests import Request, RequestError, SamplingParams

pytestmark = pytest.mark.fast


def test_a_request_may_name_128_chosen_ids_and_ask_for_k_up_to_512():
    params = SamplingParams(logprobs=512, extra_token_ids=tuple(range(128)))
    assert (params.num_columns, len(params.extra_token_ids)) == (513, 128)
    with pytest.raises(RequestError, match="129 extra_token_ids; a request may name 128"):
        SamplingParams(logprobs=0, extra_token_ids=tuple(range(129)))
    with pytest.raises(RequestError, match="logprobs = 513"):
        SamplingParams(logprobs=513)


def test_kept_sets_are_asked_for_by_true_or_false():
    assert SamplingParams(kept_token_ids=True).kept_token_ids
    for wrong in (1, None, "yes"):
        with pytest.raises(RequestError, match=r"kept_token_ids = .* must be True or False"):
            SamplingParams(kept_token_ids=wrong)


@pytest.mark.parametrize("id", [["a"], {"a": 1}, 7, b"a", None])
def test_an_id_is_a_string(id):
    """An engine finds requests by their ids, and sends these to its workers as text."""
    with pytest.raises(RequestError, match=r"^request id = .* must be a string"):
        Request(id=id, prompt_token_ids=(1,))
    assert Request(id="a", prompt_token_ids=(1,)).id == "a"
