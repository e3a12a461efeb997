"""Logprobs, where no other test pins a line of docs/semantics.md; expectations written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind, LogprobsMode
from jax_specdec.device.drafting.drafters import no_drafts
from jax_specdec.device.loop.host_slots import Slot, asked_of_slots, widths_of_slots
from jax_specdec.device.messages import row_logprobs, step_messages
from jax_specdec.device.messages.pack import SlotFields, pack, select_rows
from jax_specdec.records.decode import decode
from jax_specdec.records.output_processor import ProcessorError, ProcessorState, admit, step
from jax_specdec.requests import RequestError, SamplingParams
from pallas_kernels import TopkLogprobs, oracle, topk_logprobs, xla
from tests.support.processor_messages import request, target, tokens

pytestmark = pytest.mark.fast

INF = np.inf


def one_row(values, token, k, **options):
    """The answer for a single row, as plain lists."""
    options = {name: jnp.asarray([value]) for name, value in options.items()}
    found = topk_logprobs(
        jnp.asarray([values], jnp.float32), jnp.array([token], jnp.int32), k, **options
    )
    return [np.asarray(part)[0].tolist() for part in found]


def test_the_oracle_holds_to_the_stated_bound():
    assert (oracle.ABSOLUTE_ERROR, oracle.RELATIVE_ERROR) == (1e-5, 2e-7)
    exact = np.array([-50.0])
    oracle.assert_logprobs_close((exact + 1.9e-5).astype(np.float32), exact)
    with pytest.raises(AssertionError):
        oracle.assert_logprobs_close((exact + 2.7e-5).astype(np.float32), exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spread", [1e-3, 3.0, 60.0, 6e4])
def test_the_error_bound_holds_for_every_dtype_and_spread(dtype, spread):
    """From nearly equal logits, where the sum decides, to logprobs of minus ten thousands."""
    rng = np.random.default_rng(8)
    x = np.clip(rng.normal(size=(4, 30_000)) * spread / 3, -6.5e4, 6.5e4).astype(jnp.dtype(dtype))
    token_ids = rng.integers(0, 30_000, 4).astype(np.int32)
    extra = rng.integers(0, 30_000, (4, 128)).astype(np.int32)
    found = topk_logprobs(
        jnp.asarray(x), jnp.asarray(token_ids), 20, extra_token_ids=jnp.asarray(extra)
    )
    oracle.assert_matches(found, oracle.topk_logprobs(x, token_ids, 20, extra_token_ids=extra))
    assert found.logprobs.dtype == jnp.float32


def test_equal_logits_share_the_best_rank_and_come_lowest_id_first():
    row = [1.0, 3.0, -0.0, 3.0, 0.0, 3.0]
    for token, rank in enumerate([4, 1, 5, 1, 5, 1]):
        ids, _, got, _ = one_row(row, token, 6)
        assert got == rank
        assert ids == [token, 1, 3, 5, 0, 2, 4]  # -0.0 before 0.0: they are equal, 2 < 4
    ids, logprobs, _, _ = one_row(row, 5, 3)
    assert ids == [5, 1, 3, 5]  # the emitted token once in column 0 and once in its place
    assert len(set(logprobs)) == 1


def test_missing_invalid_and_skipped_columns():
    ids, logprobs, rank, extra = one_row([-INF, 2.0, -INF], 0, 2, extra_token_ids=[1, 2])
    assert (ids, logprobs, rank, extra) == ([0, 1, -1], [-INF, 0, -INF], 2, [0, -INF])
    ids, logprobs, rank, extra = one_row([INF, 2.0, 1.0], 1, 2, extra_token_ids=[1, 2])
    assert (ids, rank) == ([1, -1, -1], 0)
    assert np.isnan([*logprobs, *extra]).all()
    found = topk_logprobs(jnp.zeros((3, 4)), jnp.zeros(3, jnp.int32), 1, num_rows=jnp.int32(1))
    assert np.asarray(found.token_ids).tolist() == [[0, 0], [-1, -1], [-1, -1]]
    assert np.asarray(found.token_ranks).tolist() == [1, 0, 0]
    np.testing.assert_array_equal(np.isnan(found.logprobs[:, 0]), [False, True, True])


def test_scaled_logprobs_keep_the_raw_order_and_rank():
    row = [1.0, 4.0, 2.0]
    exact = np.exp(np.array(row) / 2)
    exact = np.log(exact / exact.sum())
    ids, logprobs, rank, extra = one_row(row, 2, 3, temperatures=np.float32(2), extra_token_ids=[0])
    assert (ids, rank) == ([2, 1, 2, 0], 2)
    np.testing.assert_allclose(logprobs, exact[ids], atol=1e-6)
    np.testing.assert_allclose(extra, exact[[0]], atol=1e-6)
    # So hot that all scaled logits are equal in float32: the raw ones still decide.
    hot = one_row([1.0, 1.0 + 2**-20, 1.0], 0, 3, temperatures=np.float32(1e9))
    assert (hot[0], hot[2]) == ([0, 1, 0, 2], 2)
    assert len(set(hot[1])) == 1
    # T = 0 is greedy, whose scaled logprobs use T = 1.
    assert one_row(row, 2, 3, temperatures=np.float32(0)) == one_row(row, 2, 3)


def test_a_request_may_name_128_chosen_ids_and_ask_for_k_up_to_128():
    params = SamplingParams(logprobs=128, extra_token_ids=tuple(range(128)))
    assert (params.num_columns, len(params.extra_token_ids)) == (129, 128)
    with pytest.raises(RequestError, match="129 extra_token_ids; a request may name 128"):
        SamplingParams(logprobs=0, extra_token_ids=tuple(range(129)))
    with pytest.raises(RequestError, match="logprobs = 129"):
        SamplingParams(logprobs=129)


def test_chosen_ids_follow_the_top_k_in_the_order_of_the_request():
    """From the kernel through packer, bytes and processor; repeats and disorder stay as asked."""
    chosen = (7, 2, 7, 0)
    x = jax.random.normal(jax.random.key(2), (2, 9))
    token_ids = jnp.array([[4, 8]], jnp.int32)
    found = topk_logprobs(x, token_ids[0], 3, extra_token_ids=jnp.array([chosen] * 2, jnp.int32))
    one = jnp.ones(1, jnp.int32)
    slots = SlotFields(
        state=0 * one, mode=0 * one, columns=4 * one, num_tokens=2 * one, num_rows=2 * one,
        num_drafts=one, num_chosen=4 * one, generation=jnp.ones(1, jnp.uint32),
    )  # fmt: skip

    @jax.jit
    def packed(slots, token_ids, found):
        rows, step = select_rows(slots.num_rows, 2), jnp.zeros(2, jnp.uint32)
        return pack(slots, token_ids, rows, found, kind=Kind.TARGET, step=step, running=True,
                    draft_follows=False, process_rank=0, vocab_size=9, num_words=64)  # fmt: skip

    words = np.asarray(packed(slots, token_ids, found))
    message = decode(words[: int(wire.HEADER["num_words"].get(words))])
    state = admit(ProcessorState.empty(1), 0, 1, request(logprobs=3, extra_token_ids=chosen))
    _, (record,) = step(state, message)
    expected = np.array([oracle.log_softmax(row) for row in np.asarray(x)])
    assert record.token_ids.tolist() == [4, 8]
    np.testing.assert_allclose(record.logprobs[:, 0], expected[[0, 1], [4, 8]], atol=1e-5)
    np.testing.assert_allclose(record.chosen_logprobs, expected[:, chosen], atol=1e-5)
    best = np.sort(expected, axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(record.logprobs[:, 1:], best, atol=1e-5)


def test_rows_that_nobody_asked_for_enter_no_kernel(monkeypatch):
    """Neither those of slots without logprobs nor those of rejected drafts."""
    output = step_messages.StepOutput(
        logits=jnp.zeros((3, 2, 11)),
        token_ids=jnp.array([[1, 2], [3, -1], [4, 5]], jnp.int32),
        num_tokens=jnp.array([2, 1, 2], jnp.int32),
        num_rows=jnp.array([2, 1, 2], jnp.int32),
        num_drafts=jnp.ones(3, jnp.int32),
        drafts=no_drafts(3, 1),
        state=jnp.zeros(3, jnp.int32),
        running=jnp.bool_(True),
        greedy_rows=None,
    )
    calls = []

    def watched(logits, token_ids, k, *, row_ids, num_rows, **others):
        assert set(others.values()) == {None}  # raw, no chosen ids, one device
        count = int(num_rows)
        calls.append((k, row_ids[:count].tolist(), token_ids[:count].tolist()))
        return xla.skipped_rows(len(row_ids), k, 0)

    monkeypatch.setattr(row_logprobs, "topk_logprobs", watched)
    monkeypatch.setattr(
        step_messages, "pack", lambda *_, **__: None
    )  # what it sends: pinned elsewhere

    def message(*asked):
        slots = [Slot(params=SamplingParams(logprobs=k), most_tokens=2) for k in asked]
        widths = widths_of_slots(slots, 11)
        step_messages.target_message(
            output, asked_of_slots(slots, widths), jnp.zeros(2, jnp.uint32), widths=widths
        )

    message(None, None, None)
    assert calls == []
    message(None, 2, 0)  # slot 1's only row and both of slot 2; nothing of slot 0
    assert calls == [(5, [2, 4, 5], [3, 4, 5])]


def test_the_cumulative_logprob_is_in_the_requests_own_mode():
    params = {"logprobs": 0, "logprobs_mode": LogprobsMode.SCALED}
    state = admit(ProcessorState.empty(1), 0, 1, request(**params))
    scaled = tokens(1, 2, columns=1, mode=LogprobsMode.SCALED, logprobs=[[-0.25], [-0.5]])
    _, (record,) = step(state, target(0, scaled))
    assert record.cumulative_logprob == -0.75
    raw = tokens(1, 2, columns=1, logprobs=[[-0.25], [-0.5]])
    with pytest.raises(ProcessorError, match=r"mode SCALED; the target .* has 1, 0 and RAW"):
        step(state, target(0, raw))


def test_cumulative_logprobs_of_minus_infinity_and_nan():
    state = admit(ProcessorState.empty(1), 0, 1, request(logprobs=0))
    totals = []
    for n, value in enumerate([-0.5, -INF, -0.5, np.nan, -0.5]):
        rank = 0 if np.isnan(value) else 1
        slot = tokens(1, columns=1, logprobs=[[value]], ranks=[rank])
        state, (record,) = step(state, target(n, slot))
        totals.append(record.cumulative_logprob)
    assert totals[:3] == [-0.5, -INF, -INF]
    assert np.isnan(totals[3:]).all()


def test_the_kernels_result_has_the_stated_shapes_and_dtypes():
    found = topk_logprobs(jnp.zeros((4, 9), jnp.bfloat16), jnp.zeros(4, jnp.int32), 3)
    assert isinstance(found, TopkLogprobs)
    assert [(part.shape, part.dtype.name) for part in found] == [
        ((4, 4), "int32"),
        ((4, 4), "float32"),
        ((4,), "int32"),
        ((4, 0), "float32"),
    ]
