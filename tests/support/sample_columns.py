"""Columns for the tests of the export, delivered from encoded messages."""

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import strategies as st

from ipc.wire import KEPT_ALL
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.output_processor import step
from tests.support import processor_messages
from tests.support.processor_messages import draft, drafts, request, run, silent, target, tokens
from tests.support.random_kept import random_counts, random_kept


def three_requests():
    """Columns of three requests.

    "a" names chosen ids and has drafts, "b" has K = 2 with an invalid row and a missing candidate
    and asks for kept sets, and "c" asks for no logprobs.
    """
    state = processor_messages.all_admitted([
        request("a", logprobs=0, extra_token_ids=(7, 8), draft_logprobs=True, max_tokens=3),
        request("b", logprobs=2, temperature=0.5, kept_token_ids=True),
        request("c"),
    ])  # fmt: skip
    mixed = tokens(5, 6, drafts=4, columns=3, ranks=[2, 0],
                   logprobs=[[-1.0, -0.5, -np.inf], [np.nan] * 3])  # fmt: skip
    mixed.topk_ids[:] = [[9, -1], [-1, -1]]
    sizes, ids = np.int32([2, KEPT_ALL]), np.int32([5, 9])
    mixed = replace(mixed, kept=KeptSets.of(sizes, np.float32([-0.5, 0]), ids))
    first = target(
        0,
        tokens(1, 2, drafts=3, columns=1, chosen=2,
               logprobs=[[-0.5, -2, -3], [-0.25, -4, -np.inf]]),
        mixed,
        tokens(3, 4),
        draft_follows=True,
    )  # fmt: skip
    guesses = drafts(1, 11, 12, columns=1, chosen=2)
    second = target(1, tokens(3, columns=1, chosen=2), silent(), tokens(5), weights_version=1)
    messages = (first, draft(0, guesses, silent(), silent()), second)
    return columns_of(run(state, *messages)[1])


@st.composite
def streams(draw):
    """Draw runs: for each slot (request, steps), and for each step
    (ids, drafts, logprobs [n, C], logprobs of the drafts or None where their message has none,
    kept sets or None where they were not asked for).
    """
    runs, num_steps = [], draw(st.integers(1, 4))
    for slot in range(draw(st.integers(1, 3))):
        k = draw(st.none() | st.integers(0, 2))
        chosen = () if k is None else draw(st.permutations((3, 5, 9)))[: draw(st.integers(0, 3))]
        asked = request(
            f"r{slot}",
            logprobs=k,
            extra_token_ids=tuple(chosen),
            max_tokens=draw(st.integers(1, 9)),
            draft_logprobs=k is not None and draw(st.booleans()),
            kept_token_ids=draw(st.booleans()),
            entropy=k is not None and draw(st.booleans()),
            log_sum_exp=k is not None and draw(st.booleans()),
            row_digest=k is not None and draw(st.booleans()),
        )
        steps = []
        for _ in range(num_steps):
            guesses = draw(st.lists(st.integers(0, 30), max_size=3))
            ids = [*guesses[: draw(st.integers(0, len(guesses)))], draw(st.integers(31, 40))]
            width = asked.params.num_columns + len(chosen)
            table = draw(logprobs_table(len(ids), width + asked.params.row_values.bit_count()))
            drafted = None
            if asked.params.draft_logprobs and guesses and draw(st.booleans()):
                drafted = draw(logprobs_table(len(guesses), width))
            kept = None
            if asked.params.kept_token_ids:
                rng = Random(draw(st.integers(0, 2**31)))
                kept = random_kept(rng, random_counts(rng, len(ids), 4), 50)
            steps.append((ids, guesses, table, drafted, kept))
        runs.append((asked, steps))
    return runs


def logprobs_table(rows, width):
    """Draw logprobs [rows, width]; -inf is legal, and NaN stands in an invalid row."""
    some = st.floats(-50, 0, width=32) | st.just(-np.inf) | st.just(np.nan)
    return st.lists(st.lists(some, min_size=width, max_size=width), min_size=rows, max_size=rows)


def delivered(runs):
    """The columns of `runs`, delivered message by message."""
    return columns_of(released(runs))


def columns_of(batches):
    builder = ColumnBuilder()
    for records in batches:
        builder.add(records)
    return builder.columns()


def released(runs):
    """The records of `runs`, message by message."""
    state = processor_messages.all_admitted([asked for asked, _ in runs])
    for number in range(len(runs[0][1])):
        targets, guessed = [], []
        for asked, steps in runs:
            ids, guesses, table, drafted, kept = steps[number]
            k, chosen = asked.params.num_columns, len(asked.params.extra_token_ids)
            shape = {"drafts": len(guesses), "columns": k, "chosen": chosen}
            slot = tokens(*ids, logprobs=table if k else None, **shape)
            targets.append(replace(slot, kept=kept, values=asked.params.row_values))
            one = tokens(*guesses, logprobs=drafted, **shape)
            guessed.append(silent() if drafted is None else one)
        follows = any(steps[number][3] is not None for _, steps in runs)
        messages = [target(number, *targets, draft_follows=follows)]
        messages += [draft(number, *guessed)] if follows else []
        for message in messages:
            state, records = step(state, message)
            yield records
