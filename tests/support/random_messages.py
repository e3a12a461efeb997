"""Random requests, and random slots of messages about them."""

import math
from dataclasses import replace

from ipc.wire import LogprobsMode, SlotState
from jax_specdec.records.encode import SlotContents
from jax_specdec.requests import Request, SamplingParams
from tests.support.random_kept import random_counts, random_kept

VOCABULARY = 5


def random_params(rng):
    logprobs, max_tokens = rng.choice((None, 0, 1, 3)), rng.choice((1, 2, 5, 12, 30))
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(rng.choice((0, 0, 2, 4)), max_tokens),
        stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 1)))),
        stop_sequences=tuple(
            tuple(rng.choices(range(VOCABULARY), k=rng.choice((1, 2, 2, 3, 4))))
            for _ in range(rng.choice((0, 1, 3)))
        ),
        logprobs=logprobs,
        logprobs_mode=rng.choice(list(LogprobsMode)),
        extra_token_ids=tuple(range(rng.randint(0, 2))) if logprobs is not None else (),
        draft_logprobs=rng.random() < 0.5,
        prompt_logprobs=rng.choice((None, None, None, None, 0, 2)),
        kept_token_ids=rng.random() < 0.4,
        entropy=logprobs is not None and rng.random() < 0.3,
        log_sum_exp=logprobs is not None and rng.random() < 0.3,
        row_digest=logprobs is not None and rng.random() < 0.3,
    )


def random_request(rng, name):
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice((1, 2, 5))))
    params = random_params(rng)
    if params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs_start=rng.randrange(len(prompt)))
    return Request(id=name, prompt_token_ids=prompt, params=params)


def random_rows(rng, params, n, bits=0, **fields):
    """Slot fields for n tokens, rows included, some of them invalid; `bits` name their values."""
    columns, chosen = params.num_columns, len(params.extra_token_ids)
    width = columns + chosen + bits.bit_count()
    rows = min(n, 1) if fields["state"] is SlotState.PREFILL_FIRST_TOKEN else n
    invalid = [rng.random() < 0.05 for _ in range(rows if columns else 0)]
    values = [0.0, -0.125, -1.5, -3.25, -math.inf]
    return SlotContents(
        token_ids=[rng.randrange(VOCABULARY) for _ in range(n)],
        mode=params.logprobs_mode,
        columns=columns,
        num_chosen=chosen,
        values=bits,
        token_ranks=[0 if bad else rng.randint(1, 9) for bad in invalid],
        logprobs=[
            [math.nan if bad else rng.choice(values) for _ in range(width)] for bad in invalid
        ],
        topk_ids=[
            [-1 if bad else rng.randrange(VOCABULARY) for _ in range(columns - 1)]
            for bad in invalid
        ],
        **fields,
    )


def random_target_slot(rng, params, generation, *, fresh):
    state = rng.choice([SlotState.TOKENS] * 30 + list(SlotState))
    if state is SlotState.PREFILL_FIRST_TOKEN and not fresh:
        state = SlotState.TOKENS
    drafts = rng.choice((0, 0, 1, 2, 4))
    fields = {"state": state, "generation": generation, "num_drafts": drafts}
    if state not in (SlotState.TOKENS, SlotState.PREFILL_FIRST_TOKEN):
        return SlotContents(**fields)
    n = rng.randint(1, drafts + 1) if state is SlotState.TOKENS else drafts + 1
    bits = params.row_values if rng.random() > 0.005 else 3 & ~params.row_values
    bits = bits if params.num_columns else 0
    slot = random_rows(rng, params, n, bits, **fields)
    if not params.kept_token_ids:
        return slot
    rows = 1 if state is SlotState.PREFILL_FIRST_TOKEN else n
    return replace(slot, kept=random_kept(rng, random_counts(rng, rows, VOCABULARY), VOCABULARY))


def random_draft_slot(rng, params, generation):
    n = rng.choice((0, 1, 2, 4))
    if rng.random() < 0.02:  # the rows of some request: another K, mode or number of chosen ids
        params = random_params(rng)
    return random_rows(rng, params, n, state=SlotState.TOKENS, generation=generation, num_drafts=n)


def random_prompt_slot(rng, params, generation, tokens):
    """A chunk of a prompt: `tokens` with the columns of the prompt's own K."""
    asked = replace(params, logprobs=params.prompt_logprobs or 0)
    fields = {"state": SlotState.TOKENS, "generation": generation}
    if not tokens:
        return SlotContents(generation=generation, state=SlotState.NOTHING)
    return replace(random_rows(rng, asked, len(tokens), **fields), token_ids=tokens)
