"""Raw, scaled and processed logprobs, by request, for target and draft rows, in one batch."""

import functools
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.wire import LogprobsMode, SlotState
from jax_specdec.device.drafting.drafters import MtpDrafter, no_drafts
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages import step_messages
from jax_specdec.device.messages.batch_options import options_of_requests, widths_of
from jax_specdec.device.messages.pack import select_rows
from jax_specdec.device.messages.row_logprobs import row_logprobs
from jax_specdec.device.messages.step_messages import draft_message, step_output, target_message
from jax_specdec.requests import SamplingParams
from pallas_kernels.sampling.cuts import search
from pallas_kernels.sampling.distribution import truncation
from pallas_kernels.sampling.drafts import draw
from pallas_kernels.sampling.types import Drafts, Verified
from pallas_kernels.sampling.verification import verify
from tests.support import in_mode, quick_compile
from tests.support.decoding import random_model

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
S, V = 3, 7


@functools.partial(quick_compile.jit, static_argnames="widths")
def jitted(x, token_ids, num_rows, asked, widths, cut=None):
    return row_logprobs(x, token_ids, select_rows(num_rows, x.shape[1]), asked, widths, cut=cut)


def asked_by(*params):
    """(asked, widths) of requests with these parameters."""
    widths = widths_of(params, V)
    return options_of_requests(params, widths), widths


ties = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.0, -1.5, -np.inf])
odd = ties | st.sampled_from([np.nan, np.inf])
row_values = st.lists(ties, min_size=V, max_size=V) | st.lists(odd, min_size=V, max_size=V)
asks = st.builds(
    SamplingParams,
    logprobs=st.integers(0, V),
    logprobs_mode=st.sampled_from(LogprobsMode),
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([1.0, 0.83, 0.41]),
    min_p=st.sampled_from([0.0, 0.07, 0.6]),
    extra_token_ids=st.lists(st.integers(0, V - 1), max_size=5).map(tuple),
)


@pytest.mark.long
@settings(max_examples=60)
@given(
    values=st.lists(row_values, min_size=2 * S, max_size=2 * S),
    token_ids=st.lists(st.integers(0, V - 1), min_size=2 * S, max_size=2 * S),
    num_rows=st.tuples(st.integers(0, S), st.integers(0, S)),
    params=st.tuples(asks, asks),
)
def test_any_two_requests_in_one_batch(values, token_ids, num_rows, params):
    """Ties at the boundary, -inf, invalid rows, T = 0, K beyond what is kept, chosen ids."""
    x = np.array(values, np.float32).reshape(2, S, V)
    token_ids = np.array(token_ids, np.int32).reshape(2, S)
    found = jitted(x, token_ids, np.array(num_rows, np.int32), *asked_by(*params))
    row, found = 0, jax.tree.map(np.asarray, found)
    for b, one in enumerate(params):
        count, k, c = num_rows[b], one.num_columns - 1, len(one.extra_token_ids)
        part = slice(row, row + count)
        columns = found.logprobs[part, : k + 1], found.token_ids[part, 1 : k + 1]
        ranks, chosen = found.token_ranks[part], found.extra_logprobs[part, :c]
        in_mode.check_rows(x[b, :count], one, token_ids[b, :count], *columns, ranks, chosen)
        # Column 0 names the token, excluded or not.
        np.testing.assert_array_equal(found.token_ids[part, 0], token_ids[b, :count])
        row += count
    assert (found.token_ids[row:] == -1).all()  # skipped


def searches(function, *arguments):
    """How many searches for the end of a prefix a function's program has."""
    jax.clear_caches()  # what was traced before is not traced again
    with mock.patch.object(search, "searched", wraps=search.searched) as searched:
        jax.eval_shape(lambda *x: function(*x), *arguments)
    return searched.call_count


def test_each_distribution_is_cut_once():
    """Verification cuts a row and drawing cuts a draft; the logprobs of both come after."""
    params, model = random_model()
    config = LoopConfig(model, MtpDrafter(model, 2), num_slots=2, max_length=16)
    asks = SamplingParams(temperature=1.0, top_p=0.9, logprobs=3, logprobs_mode=PROCESSED,
                          draft_logprobs=True)  # fmt: skip
    asked, widths = asked_by(asks, asks)
    vocab = 2048  # more than candidates can hold
    rows, lengths = jnp.zeros((2, 3, vocab)), jnp.zeros(2, jnp.int32)
    one_cut = searches(truncation, rows, asked.sampling)
    assert one_cut == 1  # for keys and ids, of top-k and of top-p
    drafts = Drafts.none(2, 2, vocab)
    assert searches(lambda x: draw(x, asked.sampling, lengths), rows[:, :1]) == 0
    assert searches(lambda x: verify(x, drafts, asked.sampling, lengths), rows) == one_cut
    one_step = functools.partial(step, config, report_widths=widths)
    output = jax.eval_shape(lambda: one_step(params, init_state(config), asked))[1]
    told = output._replace(logits=rows)
    more = {"options": asked, "stamp": jnp.zeros(2, jnp.uint32), "widths": widths}
    # The control: an output that does not say how it was cut.
    for said, cuts in ((told, 0), (told._replace(cut=None), one_cut)):
        assert searches(functools.partial(target_message, **more), said) == cuts
        assert searches(functools.partial(draft_message, **more), said) == 0


def test_no_rounding_gives_a_probability_above_one():
    """With one token left by top-k, its logprob and the log of its share are rounded apart."""
    random = np.random.default_rng(0)
    x = random.normal(0, 3, (1, 64, 61)).astype(np.float32)
    token_ids, count = x.argmax(axis=-1).astype(np.int32), np.array([64], np.int32)
    params = SamplingParams(temperature=1.0, top_k=1, logprobs=0, logprobs_mode=PROCESSED)
    asked, widths = asked_by(params)
    processed = jitted(x, token_ids, count, asked, widths).logprobs
    np.testing.assert_allclose(processed, 0, atol=1e-6)
    assert (processed <= 0).all()
    # The control: the difference of the two is above 0 in some of these rows.
    scaled = jitted(x, token_ids, count, *asked_by(replace(params, logprobs_mode=SCALED))).logprobs
    log_kept = quick_compile.jit(truncation)(x, asked.sampling).log_kept
    assert (scaled[:, 0] - log_kept[0] > 0).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_differences_beyond_float32_are_minus_infinity(dtype):
    """Of finite logits too; x - m is taken before it is divided, so no temperature helps."""
    modes = [(RAW, 0.5), (SCALED, 4.0), (SCALED, 0.5), (SCALED, 0.1), (PROCESSED, 4.0),
             (PROCESSED, 0.1)]  # fmt: skip
    params = [SamplingParams(logprobs=4, logprobs_mode=mode, temperature=t) for mode, t in modes]
    widths, count = widths_of(params, 4), len(modes)
    x = np.tile(np.array([2e38, 1e38, -2e38, -np.inf]), (count, 1, 1)).astype(jnp.dtype(dtype))
    ones, token = np.ones(count, np.int32), np.full((count, 1), 2, np.int32)
    found = jitted(x, token, ones, options_of_requests(params, widths), widths)
    first = np.array([-1, -1 / 4, -2, -np.inf, -1 / 4, -np.inf]) * 1e38
    np.testing.assert_allclose(found.logprobs[:, 2], first, rtol=1e-2)
    assert not np.asarray(found.logprobs[:, 1]).any()
    assert np.isneginf(np.asarray(found.logprobs)[:, [0, 3, 4]]).all()
    ids = [[2, 0, 1, 2, -1]] * 4 + [[2, 0, 1, -1, -1], [2, 0, -1, -1, -1]]
    np.testing.assert_array_equal(found.token_ids[:, :5], ids)
    assert found.token_ranks.tolist() == [3] * count


def test_rows_that_nobody_asked_for_enter_no_kernel(monkeypatch):
    """Of slots that want no logprobs or do not decode, and of rejected drafts."""
    drafts = no_drafts(4, 1)._replace(num=jnp.ones(4, jnp.int32))
    verified = Verified(jnp.ones((4, 2), jnp.int32), jnp.array([2, 1, 2, 2], jnp.int32))
    active, running = jnp.array([True, True, True, False]), jnp.bool_(True)
    output = step_output(jnp.zeros((4, 2, V)), drafts, verified, active=active, running=running)
    said = output.num_tokens, output.num_rows, output.num_drafts, output.drafts.num
    assert [x.tolist() for x in said] == [*2 * [[2, 1, 2, 0]], *2 * [[1, 1, 1, 0]]]
    assert output.state.tolist() == [*3 * [SlotState.TOKENS], SlotState.STOPPED]
    calls = []

    def watched(logits, token_ids, rows, options, widths, *_, **__):
        calls.append((widths.k, rows.flat[: int(rows.num)].tolist()))

    monkeypatch.setattr(step_messages, "row_logprobs", watched)
    # It has tests of its own.
    monkeypatch.setattr(step_messages, "pack", lambda *_, **__: jnp.zeros(0, jnp.uint32))
    for ks in ((None, None, None, None), (None, 2, 0, 3)):
        asked, widths = asked_by(*(SamplingParams(logprobs=k) for k in ks))
        target_message(output, asked, jnp.zeros(2, jnp.uint32), widths=widths)
    assert calls == [(5, [2, 4, 5])]
