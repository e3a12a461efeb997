"""A real model's ids and logprobs have the same bits in every engine, and in the learner.

Named so that the ordinary test run does not collect it: `.ci/heavy real` does.
"""

import dataclasses
import os
import signal
from functools import partial
from unittest import mock

import numpy as np
import pytest

from jax_specdec.device.model import load_model, sequence_logprobs
from jax_specdec.engine import Engine, EngineConfig, Serves
from jax_specdec.requests import LogprobsMode
from jax_specdec.text.tokenizer import Tokenizer
from tests.real import model
from tests.support import quick_compile
from tests.support.requests import request

V, LENGTH, TOKENS = 49_152, 256, 128

pytestmark = pytest.mark.timeout(3600)


def asked(tokens):
    """Raw, scaled and processed; greedy and sampled; 16 prompts of many languages, 3 are scored."""
    tokenizer, found = Tokenizer(model.path(), V), []
    for number, prompt in enumerate(model.PROMPTS):
        mode = list(LogprobsMode)[number % 3]
        found.append(request(
            str(number), model.encoded(tokenizer, prompt),
            max_tokens=tokens, logprobs=(0, 5, 20)[number % 3], logprobs_mode=mode, seed=number,
            temperature=(0.0, 0.8)[number // 3 % 2], top_p=(1.0, 0.9)[number % 2], top_k=40,
            kept_token_ids=mode is LogprobsMode.PROCESSED,
            prompt_logprobs=0 if number % 6 == 3 else None,
        ))  # fmt: skip
    return found


def decoded_with(requests, *, kill=False, **changes):
    """Records by request; with `kill`, the worker is lost after some steps and replaced."""
    config = EngineConfig(
        weights=str(model.path()), vocab_size=V, max_length=LENGTH,
        batch_invariant=True, on_worker_loss="restart", resume_lost=True, restart_delay=0.0,
        serves=Serves.of(one.params for one in requests), **changes,
    )  # fmt: skip
    records, lost = {one.id: [] for one in requests}, 0
    # Workers compile as users do: without optimizations, XLA contracts here and not there.
    with mock.patch.dict(os.environ, XLA_FLAGS=""), Engine(config) as engine:
        for number, update in enumerate(engine.generate(requests)):
            for record in update.records:
                records[record.request_id].append(record)
            if kill and number == 20:
                os.kill(engine.sessions[0].worker.pid, signal.SIGKILL)
                lost += 1
    assert lost == kill
    return records


def rows(records):
    """What has tokens: parts of a scored prompt, and of what followed."""
    return [record.prompt or record for record in records if record.prompt or record.num_tokens]


def values(records):
    names = ("token_ids", "logprobs", "topk_ids")
    return [np.concatenate([getattr(part, name) for part in rows(records)]) for name in names]


def same(one, other):
    """How many tokens have the same id and logprobs, of all."""
    ids, logprobs, top = zip(one, other, strict=True)
    equal = (ids[0] == ids[1]) & (logprobs[0].view(np.int32) == logprobs[1].view(np.int32)).all(1)
    return int((equal & (top[0] == top[1]).all(1)).sum()), len(equal)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_and_the_learner_have_the_same_bits(dtype):
    requests, decoded = asked(TOKENS), partial(decoded_with, dtype=dtype)
    first = decoded(requests, drafter="none", num_slots=8, num_drafts=0, prefill_chunk=64)
    others = {
        "4 slots, ngram, chunks of 16, a lost worker": decoded(
            requests, drafter="ngram", num_slots=4, num_drafts=4, prefill_chunk=16, kill=True
        ),
        "1 slot, suffix, chunks of 32": decoded(
            requests[::3], drafter="suffix", num_slots=1, num_drafts=3, prefill_chunk=32
        ),
    }  # fmt: skip
    for name, records in others.items():
        counts = [same(values(first[id]), values(found)) for id, found in records.items()]
        print(dtype, name, *map(sum, zip(*counts, strict=True)))
        assert all(equal == total for equal, total in counts)
    params, config = load_model(model.path(), dtype=dtype)
    config = dataclasses.replace(config, row_tile=EngineConfig.row_tile)
    score = quick_compile.as_users(sequence_logprobs, static_argnums=1, static_argnames="digest")
    total = 0
    for one in requests:
        some = [record for record in first[one.id] if record.num_tokens]
        start = len(one.prompt_token_ids)
        ids = np.zeros((1, LENGTH), np.int32)
        own = [*one.prompt_token_ids, *np.concatenate([r.token_ids for r in some])]
        ids[0, : len(own)] = own
        kept, t = None, np.full((1, LENGTH - 1), one.params.temperature, np.float32)
        if one.params.kept_token_ids:
            places = np.full((1, LENGTH - 1), -1)
            places[0, start - 1 : len(own) - 1] = np.arange(len(own) - start)
            joined = type(some[0].kept).joined([r.kept for r in some])
            kept = joined.padded(places, width=64)
        elif one.params.logprobs_mode is LogprobsMode.RAW:
            t = None
        found = np.asarray(score(params, config, ids, t, kept, digest=some[0].digest))
        said = np.concatenate([part.logprobs[:, 0] for part in rows(first[one.id])])
        ratios = np.exp(found[0, len(own) - 1 - len(said) : len(own) - 1] - said)
        assert (ratios == 1).all(), (one.id, ratios[ratios != 1])
        total += len(ratios)
    print(dtype, "learner: ratio 1 for", total)
    assert total > TOKENS * len(requests)  # and rows of prompts
