"""States and messages for the tests of the processor: small, with values that name their origin."""

import numpy as np

from ipc.wire import Kind, LogprobsMode, SlotState
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorState, admit, step
from jax_specdec.requests import Request, SamplingParams


def request(id="r", **params):
    return Request(id=id, prompt_token_ids=(1, 2), params=SamplingParams(**params))


def tokens(
    *ids,
    generation=1,
    drafts=None,
    logprobs=None,
    columns=0,
    chosen=0,
    state=SlotState.TOKENS,
    mode=LogprobsMode.RAW,
    rows=None,
    ranks=None,
):
    """A slot with tokens; `logprobs` [n, columns + chosen] are made from the ids if not given."""
    rows = ids[: (len(ids) if columns else 0) if rows is None else rows]
    if logprobs is None:
        logprobs = [[-(id + 1) / (8 * (c + 1)) for c in range(columns + chosen)] for id in rows]
    return SlotContents(
        state=state,
        generation=generation,
        mode=mode,
        num_drafts=max(len(ids) - 1, 0) if drafts is None else drafts,
        columns=columns,
        num_chosen=chosen,
        token_ids=ids,
        token_ranks=[id % 5 + 1 for id in rows] if ranks is None else ranks,
        logprobs=np.asarray(logprobs, np.float32),
        topk_ids=[[id + c for c in range(columns - 1)] for id in rows],
    )


def first_token(id, *draft_ids, generation=1, columns=0):
    """A prefill's first token, and the drafts of the next step as bare ids."""
    first = {"state": SlotState.PREFILL_FIRST_TOKEN, "rows": int(columns > 0)}
    return tokens(id, *draft_ids, generation=generation, columns=columns, **first)


def silent(state=SlotState.NOTHING, generation=1):
    return SlotContents(state=state, generation=generation)


def target(step, *slots, draft_follows=False, **header):
    return decode(encode(Kind.TARGET, step, slots, draft_follows=draft_follows, **header))


def draft(step, *slots, **header):
    return decode(encode(Kind.DRAFT, step, slots, **header))


def drafts(*ids, **fields):
    """A slot of a draft message: all the drafts of the step."""
    return tokens(*ids, drafts=len(ids), **fields)


def admitted(num_slots=1, slot=0, generation=1, prefill=False, handed_over=None, **params):
    """A state with one request."""
    how = {"prefill": prefill, "handed_over": handed_over}
    return admit(ProcessorState.empty(num_slots), slot, generation, request(**params), **how)


def all_admitted(requests, **options):
    """The state with each request in a slot of its own, of generation 1."""
    state = ProcessorState.empty(len(requests), **options)
    for slot, one in enumerate(requests):
        state = admit(state, slot, 1, one)
    return state


def run(state, *messages):
    """The last state, and the records of each message."""
    released = []
    for message in messages:
        state, records = step(state, message)
        released.append(list(records))
    return state, released
