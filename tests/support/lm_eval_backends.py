"""lm-evaluation-harness through a server, against its own transformers backend."""

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

TOLERANCE = 1e-3


def client_of(server, tokenizer, length, **options):
    """The harness's client of a server, with the tokenizer of a directory."""
    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model="model", tokenizer=str(tokenizer),
        tokenizer_backend="huggingface", num_concurrent=4, max_length=length + 2, **options,
    )  # fmt: skip


def answers(backends, kind, arguments):
    asked = [
        Instance(request_type=kind, doc={}, arguments=one, idx=n) for n, one in enumerate(arguments)
    ]
    return [getattr(each, kind)(asked, disable_tqdm=True) for each in backends]


def check_loglikelihoods(backends, pairs):
    want, got = answers(backends, "loglikelihood", pairs)
    assert len({round(value, 2) for value, _ in want}) > len(pairs) // 2
    for (value, greedy), (other, other_greedy) in zip(want, got, strict=True):
        assert other == pytest.approx(value, abs=TOLERANCE)
        assert other_greedy == greedy


def check_generated(backends, texts, *, until, different):
    settings = {"until": until, "max_gen_toks": 24, "do_sample": False, "temperature": 0.0}
    want, got = answers(backends, "generate_until", [(text, settings) for text in texts])
    assert got == want
    assert len(set(want)) > different
