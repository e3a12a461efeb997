"""Batches in another order than the slots': one permutation undoes it, before packing.

The loop of this package keeps every request in its slot, so nothing here runs in it. It is for
models whose attention wants another order, such as decoding rows before prompt chunks, and for
drafters with an order of their own.

An order is [B] int32: `order[i]` is the slot whose rows stand at place i of the batch. One gather
by its inverse puts any per-slot array back, whatever its other axes and whatever the permutation;
swapping pairs in place is right only for permutations that are made of swaps. Rows that were
compacted, with their logprobs and token ranks, need not move at all: each names its slot, and
only that name changes.

Axes: B slots, S positions, R rows.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from ipc.wording import counted
from jax_specdec.pack import Rows, SlotFields

Tree = TypeVar("Tree")


def reorder(tree: Tree, order: jax.Array) -> Tree:
    """Per-slot arrays [B, ...], from slot order to `order`."""
    found: Tree = jax.tree.map(lambda x: x[order], tree)
    return found


def undo(tree: Tree, order: jax.Array) -> Tree:
    """Per-slot arrays [B, ...], from `order` back to slot order.

    Tokens, counts, offsets into arrays that stay as they are, logprobs and token ranks by slot and
    position, drafts: one tree, one permutation.
    """
    return reorder(tree, inverse(order))


def move(tree: Tree, source: jax.Array, target: jax.Array) -> Tree:
    """Per-slot arrays [B, ...], from one order to another: a drafter's to the model's, say.

    One gather, by the composed permutation.
    """
    return reorder(tree, inverse(source)[target])


def inverse(order: jax.Array) -> jax.Array:
    """The place of each slot. [B] int32"""
    place = jnp.arange(order.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(place).at[order].set(place, mode="drop")


def undo_rows(rows: Rows, order: jax.Array, num_positions: int) -> Rows:
    """The rows of a batch in `order`, named by slot; the values that go with them stay in place.

    Args:
      rows: from `select_rows`, of counts in `order`.
      num_positions: S.
    """
    total = order.shape[0] * num_positions
    place = jnp.minimum(rows.flat // num_positions, order.shape[0] - 1)
    flat = order[place] * num_positions + rows.flat % num_positions
    return Rows(jnp.where(rows.flat < total, flat, total), rows.num)


def undo_message(
    slots: SlotFields, token_ids: jax.Array, rows: Rows, order: jax.Array
) -> tuple[SlotFields, jax.Array, Rows]:
    """What `pack` takes, from `order` to slot order, checked.

    Args:
      slots: [B], in `order`.
      token_ids: [B, S] int32, in `order`.
      rows: which rows the logprobs are of, in `order`.
      order: [B] int32.

    Returns:
      The three in slot order; the logprobs go into `pack` as they are. If `order` is no
      permutation, every count is -1: then `pack` sets the message's error bit, and nothing of the
      step is sent.
    """
    back, ids = undo((slots, token_ids), order)
    counts = jnp.where(is_permutation(order), back.num_tokens, -1)
    return back._replace(num_tokens=counts), ids, undo_rows(rows, order, token_ids.shape[1])


def is_permutation(order: jax.Array) -> jax.Array:
    """Whether `order` [B] names every slot once. [] bool"""
    batch = order.shape[0]
    # Negative indices would count from the end.
    slot = jnp.where(order < 0, batch, order)
    return jnp.all(jnp.zeros(batch, jnp.int32).at[slot].add(1, mode="drop") == 1)


def checked(order: ArrayLike, num_slots: int) -> np.ndarray:
    """`order` as [B] int32, checked on the host, where it comes from.

    Raises:
      ValueError: it is no permutation of the slots; says which slot is missing or comes twice.
    """
    found = np.asarray(order)
    if found.shape != (num_slots,) or found.dtype.kind not in "iu":
        raise ValueError(
            f"an order of shape {found.shape} and type {found.dtype} is none of "
            f"{counted(num_slots, 'slot')}: one whole number for each"
        )
    if found.size and not 0 <= found.min() <= found.max() < num_slots:
        raise ValueError(
            f"an order names slots from {found.min()} to {found.max()}: "
            f"there are slots 0 to {num_slots - 1}"
        )
    times = np.bincount(found, minlength=num_slots)
    if (times != 1).any():
        raise ValueError(
            f"an order names slot {int(times.argmax())} {counted(int(times.max()), 'time')} and "
            f"slot {int(times.argmin())} not at all: every slot has one place"
        )
    return found.astype(np.int32)
