"""What a request that needs a field of `Serves` asks for."""

from hypothesis import strategies as st

from ipc.wire import LogprobsMode
from jax_specdec.requests import SamplingParams, Structured

PROCESSED = LogprobsMode.PROCESSED
# By field: what such a request asks for, and what it needs there.
NEEDS = {
    "sampling": ({"temperature": 0.5}, True),
    "max_logprobs": ({"logprobs": 33}, 33),
    "max_extra_token_ids": ({"logprobs": 0, "extra_token_ids": range(17)}, 17),
    "max_logprobs_mode": ({"logprobs": 0, "logprobs_mode": PROCESSED}, PROCESSED),
    "kept_token_ids": ({"kept_token_ids": True}, True),
    "entropy": ({"logprobs": 0, "entropy": True}, True),
    "log_sum_exp": ({"logprobs": 0, "log_sum_exp": True}, True),
    "row_digest": ({"logprobs": 0, "row_digest": True}, True),
    "draft_logprobs": ({"draft_logprobs": True}, True),
    "max_logprobs_of_prompts": ({"prompt_logprobs": 0}, 0),
    "max_extra_token_ids_of_prompts": (
        {"prompt_logprobs": 0, "prompt_extra_token_ids": [[1, 2, 3]]},
        3,
    ),
    "max_changed_ids": ({"logit_bias": {1: 1.0, 2: 1.0}}, 2),
    "penalties": ({"frequency_penalty": 0.1}, True),
    "grammars": ({"structured": Structured("regex", "a"), "stop_token_ids": (0,)}, True),
}


def params_of(names):
    """The parameters of a request that needs these fields."""
    return SamplingParams(**{k: v for name in names for k, v in NEEDS[name][0].items()})


params = st.lists(st.sampled_from([*NEEDS]), unique=True).map(params_of)
