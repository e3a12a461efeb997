"""Raw, scaled and processed logprobs, by request, for target and draft rows, in one batch."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.wire import LogprobsMode
from jax_specdec.device.drafting.drafters import MtpDrafter, no_drafts
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages.batch_options import options_of_requests, widths_of
from jax_specdec.device.messages.pack import select_rows
from jax_specdec.device.messages.row_logprobs import row_logprobs
from jax_specdec.device.messages.step_messages import StepOutput, draft_message, target_message
from jax_specdec.requests import SamplingParams
from pallas_kernels.contract.rows import Outputs, skipped_rows
from pallas_kernels.sampling.distribution import truncation
from pallas_kernels.sampling.drafts import draw
from pallas_kernels.sampling.types import Drafts
from pallas_kernels.sampling.verification import verify
from tests.support import in_mode, quick_compile
from tests.support.decoding import random_model

RAW, SCALED, PROCESSED = LogprobsMode.RAW, LogprobsMode.SCALED, LogprobsMode.PROCESSED
S, V = 3, 7


@functools.partial(quick_compile.jit, static_argnames="widths")
def jitted(x, token_ids, num_rows, asked, widths, cut=None):
    return row_logprobs(x, token_ids, select_rows(num_rows, x.shape[1]), asked, widths, cut=cut)


found_cut = quick_compile.jit(truncation)


def asked_by(*params):
    """(asked, widths) of requests with these parameters."""
    widths = widths_of(params, V)
    return options_of_requests(params, widths), widths


def check_found(found, x, token_ids, num_rows, params):
    """Every row of `found` against float64, in message order."""
    row, found = 0, jax.tree.map(np.asarray, found)
    for b, one in enumerate(params):
        count, k, c = int(num_rows[b]), one.num_columns - 1, len(one.extra_token_ids)
        part = slice(row, row + count)
        in_mode.check_rows(
            x[b, :count],
            one,
            token_ids[b, :count],
            found.logprobs[part, : k + 1],
            found.token_ids[part, 1 : k + 1],
            found.token_ranks[part],
            found.extra_logprobs[part, :c],
        )
        # Column 0 names the token, excluded or not.
        np.testing.assert_array_equal(found.token_ids[part, 0], token_ids[b, :count])
        row += count
    assert (found.token_ids[row:] == -1).all()  # skipped


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
    check_found(found, x, token_ids, num_rows, params)


def searches(function, *arguments):
    """How many searches for the end of a prefix (`cutoff`) a function's program has."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            is_loop = equation.primitive.name in ("scan", "while")
            yield is_loop and "search" in str(equation.source_info.name_stack)
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(value):
                    yield from walk(getattr(value, "jaxpr", value))

    def is_jaxpr(value):
        return hasattr(value, "eqns") or hasattr(value, "jaxpr")

    return sum(walk(jax.make_jaxpr(function)(*arguments).jaxpr))


def test_each_distribution_is_cut_once():
    """Verification cuts a row and drawing cuts a draft; the logprobs of both come after."""
    params, model = random_model()
    config = LoopConfig(model, MtpDrafter(model, 2), num_slots=2, max_length=16)
    asks = SamplingParams(temperature=1.0, top_p=0.9, logprobs=3, logprobs_mode=PROCESSED,
                          draft_logprobs=True)  # fmt: skip
    asked, widths = asked_by(asks, asks)
    one_step = functools.partial(step, config, params)
    vocab = 2048  # more than candidates can hold
    rows, lengths = jnp.zeros((2, 3, vocab)), jnp.zeros(2, jnp.int32)
    one_cut = searches(truncation, rows, asked.sampling)
    assert one_cut == 1  # for keys and ids, of top-k and of top-p
    drafts = Drafts.none(2, 2, vocab)
    assert searches(lambda x: draw(x, asked.sampling, lengths), rows[:, :1]) == 0
    assert searches(lambda x: verify(x, drafts, asked.sampling, lengths), rows) == one_cut
    state = init_state(config)
    output = jax.eval_shape(lambda: one_step(state, asked, report_widths=widths))[1]
    output = output._replace(logits=rows)
    number = jnp.zeros(2, jnp.uint32)
    told = [
        functools.partial(message, options=asked, stamp=number, widths=widths)
        for message in (target_message, draft_message)
    ]
    assert [searches(message, output) for message in told] == [0, 0]
    # The control: an output that does not say how it was cut.
    unsaid = output._replace(cut=None)
    assert [searches(message, unsaid) for message in told] == [one_cut, 0]


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
    log_kept = found_cut(x, asked.sampling).log_kept
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
    """Rows of slots without logprobs and rows of rejected drafts are left out."""
    output = StepOutput(
        logits=jnp.zeros((3, 2, 11)),
        token_ids=jnp.array([[1, 2], [3, -1], [4, 5]], jnp.int32),
        num_tokens=jnp.array([2, 1, 2], jnp.int32),
        num_rows=jnp.array([2, 1, 2], jnp.int32),
        num_drafts=jnp.ones(3, jnp.int32),
        drafts=no_drafts(3, 1),
        state=jnp.zeros(3, jnp.int32),
        running=jnp.bool_(True),
    )
    calls = []

    def watched(logits, token_ids, k, *, row_ids, num_rows, **others):
        assert set(others.values()) == {None}  # raw, no chosen ids, one device
        count = int(num_rows)
        calls.append((k, row_ids[:count].tolist(), token_ids[:count].tolist()))
        return skipped_rows(len(row_ids), Outputs(k), 0)

    messages = "jax_specdec.device.messages"
    monkeypatch.setattr(f"{messages}.row_logprobs.topk_logprobs", watched)
    # What is sent of it has tests of its own.
    monkeypatch.setattr(f"{messages}.step_messages.pack", lambda *_, **__: jnp.zeros(0, jnp.uint32))

    def message(*asked):
        params = [SamplingParams(logprobs=k) for k in asked]
        widths = widths_of(params, 11)
        number = jnp.zeros(2, jnp.uint32)
        target_message(output, options_of_requests(params, widths), number, widths=widths)

    message(None, None, None)
    assert calls == []
    message(None, 2, 0)  # slot 1's only row and both of slot 2; nothing of slot 0
    assert calls == [(5, [2, 4, 5], [3, 4, 5])]
