"""Flat rows [N, V] to the message: the same words as of [B, S, V], and no row is copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.device import (
    BatchOptions,
    Drafts,
    Widths,
    draft_message,
    draft_rows,
    drafting,
    options_of_requests,
    step_output,
    target_message,
    verify,
    widths_of,
)
from jax_specdec.device.messages.logit_changes import RowChanges
from jax_specdec.requests import SamplingParams
from tests.support import quick_compile
from tests.support.lowered import array, temporaries

B, D, V = 5, 2, 40
S = D + 1
NUM = np.int32([2, 0, 1, 2, 2])
RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
MODES = {
    "raw": [RAW] * B,
    "mixed": [RAW, SCALED, PROCESSED, RAW, PROCESSED],
}


def requests(kind, *, kept=False, drafts=False):
    return [
        SamplingParams(
            logprobs=3, logprobs_mode=mode, temperature=0.8 if slot else 0.0, top_k=6, seed=slot,
            extra_token_ids=(1, 5) if slot == 2 else (), kept_token_ids=kept, draft_logprobs=drafts,
        )
        for slot, mode in enumerate(MODES[kind])
    ]  # fmt: skip


def rows():
    """Logits [B, S, V], the same as flat rows of what slots have, and their row ids."""
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 2, (B, S, V)).astype(np.float32)
    there = np.arange(S)[None] <= NUM[:, None]
    number = there.sum()
    place = rng.permutation(number + 3)[:number].astype(np.int32)
    flat = np.full((number + 3, V), np.nan, np.float32)
    flat[place] = logits[there]
    row_ids = np.full((B, S), -1, np.int32)
    row_ids[there] = place
    return logits, flat, row_ids


def changes_of(row_ids, number):
    """A mask and biases of each row, [B, S, ...] and [N, ...]."""
    rng = np.random.default_rng(9)
    words = rng.integers(-(2**31), 2**31, (B, S, 2), dtype=np.int64).astype(np.int32)
    ids = np.argsort(rng.random((B, S, V)), axis=-1)[..., :3].astype(np.int32)
    bias = rng.normal(0, 2, (B, S, 3)).astype(np.float32)
    dense = RowChanges(words, ids, bias)

    def flattened(x, missing):
        flat = np.full((number, x.shape[-1]), missing, x.dtype)
        flat[row_ids[row_ids >= 0]] = x[row_ids >= 0]
        return flat

    return dense, RowChanges(flattened(words, -1), flattened(ids, -1), flattened(bias, 0))


@functools.partial(quick_compile.jit, static_argnames=("widths", "has_read", "has_cut"))
def message(logits, drafts, asked, row_ids, changes, changed, *, widths, has_read, has_cut):
    positions = jnp.arange(B, dtype=jnp.int32)
    of_rows = {} if changes is None else changes._asdict()
    chosen = logits if changed is None else changed
    verified = verify(
        chosen, drafts, asked.sampling, positions, row_ids=row_ids,
        k=widths.k if has_read else None, **of_rows,
    )  # fmt: skip
    if not has_cut:
        verified = verified._replace(cut=None)
    active = jnp.ones(B, bool)
    output = step_output(
        logits, drafts, verified, active=active, running=active.any(), changed=changed,
    )  # fmt: skip
    return target_message(output, asked, jnp.uint32([7, 0]), widths=widths)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "has_read", "has_cut", "change"), [
    ("raw", False, True, None),
    ("raw", True, True, None),
    ("mixed", True, True, "rows"),
    ("mixed", False, False, None),
    ("mixed", False, True, "copy"),
    pytest.param("mixed", True, True, None, marks=pytest.mark.slow),
    pytest.param("mixed", False, True, None, marks=pytest.mark.slow),
])  # fmt: skip
def test_flat_rows_make_the_words_of_dense_ones(kind, has_read, has_cut, change):
    logits, flat, row_ids = rows()
    params = requests(kind, kept=kind == "mixed")
    widths = widths_of(params, V)
    asked = options_of_requests(params, widths)
    best = logits.argmax(-1).astype(np.int32)
    ids = np.where(np.arange(D) < NUM[:, None], best[:, :-1], 0)
    drafts = Drafts(jnp.asarray(ids), jnp.asarray(NUM))
    dense_changes = flat_changes = dense_copy = flat_copy = None
    if change == "rows":
        dense_changes, flat_changes = changes_of(row_ids, flat.shape[0])
    if change == "copy":
        dense_copy, flat_copy = logits * 1.25, flat * 1.25
    options = {"widths": widths, "has_read": has_read, "has_cut": has_cut}
    want = message(logits, drafts, asked, None, dense_changes, dense_copy, **options)
    found = message(flat, drafts, asked, row_ids, flat_changes, flat_copy, **options)
    np.testing.assert_array_equal(found, want)
    assert np.asarray(found).any()


@pytest.mark.long
def test_flat_rows_of_drafts_make_the_words_of_dense_ones():
    """Reports of drafts, and their message."""
    rng = np.random.default_rng(1)
    draft_logits = rng.normal(0, 2, (B, 1, V)).astype(np.float32)
    place = np.int32([6, -1, 2, 3, 0])
    flat = np.full((7, V), np.nan, np.float32)
    flat[place[place >= 0]] = draft_logits[place >= 0, 0]
    params = requests("mixed", drafts=True)
    widths = widths_of(params, V)
    asked = options_of_requests(params, widths)

    @quick_compile.jit
    def words(draft_logits, row_ids):
        rows = {} if row_ids is None else {"row_ids": row_ids}
        positions = jnp.arange(B, dtype=jnp.int32)
        drafts = drafting.draw(
            draft_logits, asked.sampling, positions,
            report_drafts=draft_rows(asked, widths), **rows,
        )  # fmt: skip
        drafts = drafts._replace(num=jnp.asarray(place >= 0).astype(jnp.int32))
        logits = jnp.zeros((B, 2, V))
        verified = verify(logits, drafts, asked.sampling, positions)
        active = jnp.ones(B, bool)
        output = step_output(logits, drafts, verified, active=active, running=active.any())
        return draft_message(output, asked, jnp.uint32([7, 0]), widths=widths)

    np.testing.assert_array_equal(words(flat, place), words(draft_logits, None))


@pytest.mark.long
def test_no_row_is_copied_on_the_way_to_the_message():
    """XLA's temporaries of a step of flat rows: a fraction of a single slot's rows."""
    slots, vocab, rows_of_all = 16, 151_936, 50
    params = [SamplingParams(logprobs=3, temperature=0.8, seed=slot) for slot in range(slots)]
    widths = widths_of(params, vocab)
    asked = options_of_requests(params, widths)

    def step(logits, ids, num, row_ids, asked: BatchOptions, widths: Widths = widths):
        drafts = Drafts(ids, num)
        positions = jnp.zeros(slots, jnp.int32)
        verified = verify(logits, drafts, asked.sampling, positions, row_ids=row_ids, k=widths.k)
        active = jnp.ones(slots, bool)
        output = step_output(logits, drafts, verified, active=active, running=active.any())
        return target_message(output, asked, jnp.uint32([7, 0]), widths=widths)

    shapes = jax.tree.map(lambda x: array(x.shape, x.dtype), asked)
    logits = array((rows_of_all, vocab), "bfloat16")
    needed = temporaries(
        step, logits, array((slots, D)), array((slots,)), array((slots, S)), shapes
    )
    copied = slots * S * vocab * 2  # what a gather of [B, S, V] would take
    assert needed < copied / 2
