"""An engine's configuration and its requests are checked before a worker starts."""

import pytest

from jax_specdec.engine.config import EngineConfig, check_request
from jax_specdec.requests import Request, RequestError, SamplingParams
from tests.support.scripted_worker import VOCAB


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 0), ("max_silence", 0.0)],  # others: docs/limits.md
)
def test_sizes_are_checked_before_memory_is_taken(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value} must be (from|above)"):
        EngineConfig(**{"vocab_size": VOCAB, field: value})


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("drafter", "mtp, model, ngram, suffix, none$"),
        ("dtype", "float32, bfloat16, float16; empty for that of the weights"),
        ("implementation", "xla, mosaic_gpu, mosaic_tpu; empty for kernels that are proved here"),
        ("on_worker_loss", "stop, continue, restart$"),
    ],
)
def test_an_unknown_choice_is_refused_before_a_worker_starts(field, known):
    for value in ("x", "MTP", "fp32"):
        with pytest.raises(ValueError, match=f"^{field} = '{value}' must be one of {known}"):
            EngineConfig(**{"vocab_size": VOCAB, field: value})


@pytest.mark.parametrize("changes", [{"drafter": "model"}, {"draft_model": "small"}])
def test_a_draft_model_and_its_drafter_come_together(changes):
    with pytest.raises(ValueError, match="and no other, needs a smaller model"):
        EngineConfig(vocab_size=VOCAB, **changes)
    EngineConfig(vocab_size=VOCAB, drafter="model", draft_model="small")


def test_unservable_requests_are_refused_before_anything_runs():
    def refuse(match, *ids, **params):
        asked = Request(id="r", prompt_token_ids=ids, params=SamplingParams(**params))
        with pytest.raises(RequestError, match=match):
            check_request(asked, EngineConfig(vocab_size=VOCAB, max_length=96))

    refuse(r"token id 99 is outside the vocabulary \(0 to 31\)", 1, 99)
    refuse("90 prompt tokens and max_tokens = 64 exceed the 96", *[1] * 90)
    refuse("logprobs = 33, but the vocabulary has only 32", 1, logprobs=33)
    chosen = {"logprobs": 0, "extra_token_ids": (1, 32)}
    refuse("extra token id 32 is outside the vocabulary", 1, **chosen)
    biased = {"logit_bias": {31: 1.0, 32: 1.0}}
    refuse(r"logit_bias token id 32 is outside the vocabulary \(0 to 31\)", 1, **biased)
    refuse("prompt_logprobs = 33, but the vocabulary has only 32", 1, prompt_logprobs=33)
