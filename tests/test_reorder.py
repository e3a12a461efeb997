"""Any batch order is undone by one permutation: up to the bytes of the message."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import wire
from ipc.wire import DeviceCheck, Kind, LogprobsMode, SlotState
from jax_specdec.decode import decode
from jax_specdec.pack import SlotFields, pack, select_rows
from jax_specdec.reorder import (
    checked,
    inverse,
    is_permutation,
    move,
    reorder,
    undo,
    undo_message,
    undo_rows,
)
from jax_specdec.sampling import Sampling
from jax_specdec.verify import Drafts, verify
from pallas_kernels import topk_logprobs

pytestmark = pytest.mark.fast

B, S, V, K = 6, 3, 16, 4
ORDERS = st.permutations(range(B)).map(lambda order: np.array(order, np.int32))
THREE_CYCLE = np.array([1, 2, 0, 3, 4, 5], np.int32)  # not made of swaps


class Permuting(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_by_hand(self):
        order = jnp.array([2, 0, 1])  # slot 2 stands first
        tree = {"ids": jnp.array([[20, 21], [0, 1], [10, 11]]), "none": None, "n": jnp.arange(3)}
        got = self.variant(undo)(tree, order)
        np.testing.assert_array_equal(got["ids"], [[0, 1], [10, 11], [20, 21]])
        np.testing.assert_array_equal(got["n"], [1, 2, 0])
        assert got["none"] is None
        back = self.variant(reorder)(got, order)
        chex.assert_trees_all_equal(back, tree)
        np.testing.assert_array_equal(self.variant(inverse)(order), [1, 2, 0])

    @chex.variants(with_jit=True, without_jit=True)
    def test_what_is_no_permutation(self):
        check = self.variant(is_permutation)
        for order, expected in [
            ([2, 0, 1], True), ([0, 1, 2], True), ([0, 0, 1], False), ([0, 1, 3], False),
            ([0, 1, -1], False), ([1, 2, 3], False),
        ]:  # fmt: skip
            assert bool(check(jnp.array(order))) is expected


def slot_data(seed):
    """What may come of a step, by slot: counts, offsets into flat tokens, logprobs, drafts."""
    random = np.random.default_rng(seed)
    return {
        "token_ids": random.integers(0, V, (B, S)).astype(np.int32),
        "num_tokens": random.integers(0, S + 1, B).astype(np.int32),
        "logprobs": random.normal(size=(B, S, K + 1)).astype(np.float32),
        "token_ranks": random.integers(1, V, (B, S)).astype(np.int32),
        "drafts": Drafts(
            random.integers(0, V, (B, S - 1)).astype(np.int32),
            random.integers(0, S, B).astype(np.int32),
            random.normal(size=(B, S - 1, V)).astype(np.float32),
        ),
    }


@given(ORDERS, ORDERS, st.integers(0, 99))
@settings(max_examples=50)
def test_one_permutation_undoes_everything(model, proposer, seed):
    data = slot_data(seed)
    in_model = jax.tree.map(lambda x: x[model], data)
    chex.assert_trees_all_equal(jax.jit(reorder)(data, model), in_model)
    chex.assert_trees_all_equal(jax.jit(undo)(in_model, model), data)
    # The proposer's order and the model's may differ: one gather by the composed permutation.
    in_proposer = jax.tree.map(lambda x: x[proposer], data)
    chex.assert_trees_all_equal(jax.jit(move)(in_proposer, proposer, model), in_model)
    # Flat tokens stay in the model's order; offsets, put back, still point at each slot's own.
    counts = in_model["num_tokens"]
    flat = np.concatenate([row[:n] for row, n in zip(in_model["token_ids"], counts, strict=True)])
    offsets = (np.cumsum(counts) - counts).astype(np.int32)
    starts, sizes = jax.jit(undo)((offsets, counts), model)
    for slot in range(B):
        np.testing.assert_array_equal(
            flat[starts[slot] :][: sizes[slot]], data["token_ids"][slot][: sizes[slot]]
        )


def swapped_back(values, order):
    """How a list is wrongly put back: the pairs change places, one after the other."""
    found = list(values)
    for place, slot in enumerate(order):
        if slot > place:
            found[place], found[slot] = found[slot], found[place]
    return found


def test_swapping_pairs_is_right_for_swaps_alone():
    swaps = np.array([1, 0, 3, 2, 5, 4], np.int32)
    for order in (swaps, THREE_CYCLE):
        np.testing.assert_array_equal(undo(order, order), np.arange(B))
    assert swapped_back(swaps, swaps) == list(range(B))
    assert swapped_back(THREE_CYCLE, THREE_CYCLE) != list(range(B))


def batch(seed, temperature):
    """Everything that enters a step, by slot: logits, drafts, sampling, positions, fields."""
    random = np.random.default_rng(seed)
    logits = (2 * random.normal(size=(B, S, V))).astype(np.float32)
    drafts = Drafts(
        np.where(random.random((B, S - 1)) < 0.7, logits[:, : S - 1].argmax(-1), 3).astype(
            np.int32
        ),
        random.integers(0, S, B).astype(np.int32),
        random.normal(size=(B, S - 1, V)).astype(np.float32),
    )
    sampling = Sampling.greedy(B)._replace(
        temperature=jnp.asarray(np.where(np.arange(B) % 2, temperature, 0.0), jnp.float32),
        seed=jnp.arange(B, dtype=jnp.uint32),
    )
    fields = {
        "columns": np.array([0, 1, K + 1, 3, K + 1, 2], np.int32)[random.permutation(B)],
        "running": random.random(B) < 0.8,
        "generation": random.integers(0, 2**32, B, dtype=np.uint32),
    }
    return logits, drafts, sampling, np.arange(B, dtype=np.int32) + 7, fields


def prepared(logits, drafts, sampling, positions, fields):
    """Verify and take logprobs, in whatever order the batch stands."""
    verified = verify(logits, drafts, sampling, positions)
    num_tokens = jnp.where(fields["running"], verified.num_tokens, 0)
    num_rows = jnp.where(fields["columns"] > 0, num_tokens, 0)
    rows = select_rows(num_rows, S)
    ids = verified.token_ids.reshape(-1).at[rows.flat].get(mode="fill", fill_value=-1)
    found = topk_logprobs(
        jnp.asarray(logits).reshape(-1, V), ids, K, row_ids=rows.flat, num_rows=rows.num
    )
    state = jnp.where(fields["running"], SlotState.TOKENS, SlotState.STOPPED)
    slots = SlotFields(
        state=state.astype(jnp.int32),
        mode=jnp.full(B, LogprobsMode.RAW, jnp.int32),
        columns=jnp.asarray(fields["columns"]),
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_drafts=jnp.where(fields["running"], drafts.num, 0),
        num_chosen=jnp.zeros(B, jnp.int32),
        generation=jnp.asarray(fields["generation"]),
    )
    return slots, verified.token_ids, rows, found


def packed(slots, token_ids, rows, found):
    return pack(
        slots, token_ids, rows, found, kind=Kind.TARGET, step=jnp.zeros(2, jnp.uint32),
        running=jnp.array(True), draft_follows=False, process_rank=0, vocab_size=V,
        num_words=wire.words_bound([S] * B, [K + 1] * B, [0] * B),
    )  # fmt: skip


def in_slot_order(*given):
    return packed(*prepared(*given))


def in_another_order(order, *given):
    """The whole way: reorder, verify and select in the model's order, undo, pack."""
    slots, token_ids, rows, found = prepared(*reorder(given, order))
    return packed(*undo_message(slots, token_ids, rows, order), found)


@functools.cache
def jitted(function):
    return jax.jit(function)


@given(ORDERS, st.integers(0, 999), st.sampled_from([0.0, 0.9]))
@settings(max_examples=40)
def test_the_bytes_are_those_of_the_batch_in_slot_order(order, seed, temperature):
    given = batch(seed, temperature)
    expected = np.asarray(jitted(in_slot_order)(*given))
    assert not wire.HEADER["error"].get(expected)
    got = np.asarray(jitted(in_another_order)(order, *given))
    assert got.tobytes() == expected.tobytes()
    message = decode(expected[: wire.HEADER["num_words"].get(expected)].tobytes())
    np.testing.assert_array_equal(message.generation, given[-1]["generation"])


def in_model_order(order, *given):
    return prepared(*reorder(given, order))


def test_without_jit_too():
    given = batch(3, 0.9)
    *model, found = jitted(in_model_order)(THREE_CYCLE, *given)
    got = packed(*undo_message(*model, jnp.asarray(THREE_CYCLE)), found)
    np.testing.assert_array_equal(got, jitted(in_slot_order)(*given))


def test_forgetting_one_of_the_three_is_noticed():
    given = batch(5, 0.0)
    expected = np.asarray(jitted(in_slot_order)(*given)).tobytes()
    order = jnp.asarray(THREE_CYCLE)
    model = jitted(in_model_order)(order, *given)
    right = (*undo_message(*model[:3], order), model[3])
    assert np.asarray(packed(*right)).tobytes() == expected
    for forgotten in range(3):
        wrong = [*right]
        wrong[forgotten] = model[forgotten]
        assert np.asarray(packed(*wrong)).tobytes() != expected


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4, 6], [-1, 1, 2, 3, 4, 5]])
def test_an_order_that_is_none_sets_the_error_bit(order):
    words = np.asarray(jitted(in_another_order)(np.array(order, np.int32), *batch(0, 0.0)))
    assert wire.HEADER["error"].get(words)
    assert int(wire.HEADER["error_checks"].get(words)) >> DeviceCheck.SLOT_COUNTS & 1


def test_rows_beyond_the_last_stay_out_of_bounds():
    rows = undo_rows(select_rows(jnp.array([1, 0, 2]), 2), jnp.array([2, 0, 1]), 2)
    np.testing.assert_array_equal(rows.flat, [4, 2, 3, 6, 6, 6])
    assert rows.num == 3


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 2, 2], "names slot 2 2 times and slot 1 not at all"),
        ([0, 1, 3], "from 0 to 3: there are slots 0 to 2"),
        ([0, 1, -1], "from -1 to 1"),
        ([0, 1], r"shape \(2,\)"),
        ([0.0, 1.0, 2.0], "one whole number for each"),
    ],
)
def test_an_order_is_checked_where_it_comes_from(order, message):
    with pytest.raises(ValueError, match=message):
        checked(order, 3)
    assert checked([2, 0, 1], 3).tolist() == [2, 0, 1]
