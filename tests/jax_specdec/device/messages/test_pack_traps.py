"""The seed system's traps 2 and 6 in the packer; the numbers are those of its list of traps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import Kind
from jax_specdec.device.messages.pack import Rows, SlotFields, pack, select_rows
from jax_specdec.records.decode import decode
from pallas_kernels import TopkLogprobs

pytestmark = pytest.mark.fast

B, S, K = 4, 3, 20


@functools.partial(jax.jit, static_argnames="num_words")
def packed(slots, token_ids, rows, found, num_words=400):
    return pack(slots, token_ids, rows, found, kind=Kind.TARGET, step=jnp.zeros(2, jnp.uint32),
                running=True, draft_follows=False, process_rank=0, vocab_size=1000,
                num_words=num_words)  # fmt: skip


def a_step(columns):
    """Slots of 1, 3, 2 and 1 tokens whose values say which slot, position and column they are."""
    num_tokens = np.array([1, 3, 2, 1], np.int32)
    columns = np.array(columns, np.int32)
    num_rows = np.where(columns > 0, num_tokens, 0).astype(np.int32)
    zero = np.zeros(B, np.int32)
    slots = SlotFields(
        state=zero, mode=zero, kept=zero, columns=columns, num_tokens=num_tokens, num_rows=num_rows,
        num_drafts=num_tokens - 1, num_chosen=zero, generation=np.arange(B, dtype=np.uint32),
    )  # fmt: skip
    token_ids = (10 * np.arange(B)[:, None] + np.arange(S)).astype(np.int32)
    rows = select_rows(jnp.asarray(num_rows), S)
    names = np.where(rows.flat < B * S, token_ids.reshape(-1)[np.minimum(rows.flat, B * S - 1)], 0)
    column = np.arange(K + 1)
    found = TopkLogprobs(
        token_ids=(names[:, None] * 20 + column).astype(np.int32),
        logprobs=-(names[:, None] + column / 32).astype(np.float32),
        token_ranks=(names + 1).astype(np.int32),
        extra_logprobs=np.zeros((B * S, 0), np.float32),
    )
    return slots, token_ids, rows, found


def test_trap_2_the_kernels_width_is_not_the_messages():
    """The kernel ran with K = 20; slots asked for none, K 0, 2 and 20."""
    slots, token_ids, rows, found = a_step([0, 1, 3, K + 1])
    words = np.asarray(packed(slots, token_ids, rows, found))
    message = decode(words[: int(wire.HEADER["num_words"].get(words))])
    for b, columns in enumerate([0, 1, 3, K + 1]):
        view = message.slot(b)
        names = token_ids[b, : slots.num_tokens[b]]
        assert view.token_ids.tolist() == names.tolist()
        if columns:
            wanted = -(names[:, None] + np.arange(columns) / 32)
            np.testing.assert_array_equal(view.logprobs, wanted.astype(np.float32))
            wanted = names[:, None] * 20 + np.arange(1, columns)
            np.testing.assert_array_equal(view.topk_ids, wanted)
            assert view.token_ranks.tolist() == (names + 1).tolist()


def test_trap_6_rows_in_any_order_come_out_in_slot_order():
    """Reordered by cycles of three and four, which swapping pairs in place cannot undo."""
    slots, token_ids, rows, found = a_step([2, 2, 2, 2])
    plain = np.asarray(packed(slots, token_ids, rows, found))
    order = np.array([2, 0, 1, 4, 5, 6, 3])  # 0 -> 2 -> 1 -> 0 and 3 -> 4 -> 5 -> 6 -> 3
    assert len(order) == int(rows.num)
    assert (order[order[:3]] != np.arange(3)).all()  # not its own inverse
    whole = np.concatenate([order, np.arange(7, B * S)])
    moved = jax.tree.map(lambda x: x[whole], found)
    reordered = Rows(rows.flat[whole], rows.num)
    np.testing.assert_array_equal(packed(slots, token_ids, reordered, moved), plain)
    # Negative control: either of the two alone gives other words.
    assert (np.asarray(packed(slots, token_ids, rows, moved)) != plain).any()
    assert (np.asarray(packed(slots, token_ids, reordered, found)) != plain).any()
