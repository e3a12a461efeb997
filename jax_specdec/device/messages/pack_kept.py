"""The end of a message on the device: where each value of the kept sets goes.

Axes: B slots, R rows, M ids of a set at most.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from ipc.wire import KEPT_MANY
from jax_specdec.kept_sets import PaddedKept


class KeptRows(NamedTuple):
    """The kept sets of a step's emitted tokens, slot after slot: the first `num` of R."""

    num: Int32[Array, ""]
    sets: PaddedKept  # [R]


class KeptLayout(NamedTuple):
    """Where the kept sets stand, in words from the start of the message."""

    counts: Int32[Array, ""]
    log_kept: Int32[Array, ""]
    ids: Int32[Array, " R"]  # of each row
    num_words: Int32[Array, ""]  # of the whole message


def kept_layout(start: Int32[Array, ""], kept: KeptRows) -> KeptLayout:
    """The places of the sets in a message whose other values end at word `start`."""
    sizes = _sizes(kept)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    ids_start = start + 2 * kept.num
    return KeptLayout(start, start + kept.num, ids_start + ends - sizes, ids_start + ends[-1])


def kept_payload(
    layout: KeptLayout, kept: KeptRows, nowhere: int
) -> list[tuple[Int32[Array, "..."], Shaped[Array, "..."]]]:
    """The values of the sets, each with the word that it goes to.

    Args:
      nowhere: the word of values that are not sent; out of bounds.
    """
    row, is_row = _rows(kept)
    return [
        (jnp.where(is_row, layout.counts + row, nowhere), kept.sets.counts),
        (jnp.where(is_row, layout.log_kept + row, nowhere), kept.sets.log_kept),
        (
            jnp.where(_is_sent(kept), layout.ids[:, None] + _column(kept), nowhere),
            kept.sets.token_ids,
        ),
    ]


def wrong_counts(kept: KeptRows, num_expected: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether there are other rows than expected, or a count that no reader would take."""
    _, is_row = _rows(kept)
    counts, most = kept.sets.counts, kept.sets.token_ids.shape[1]
    wrong = (counts == 0) | (counts < KEPT_MANY) | (counts > most)
    return jnp.any(is_row & wrong) | (kept.num != num_expected)


def wrong_ids(kept: KeptRows, vocab_size: int) -> Bool[Array, ""]:
    """Whether an id that is sent is outside the vocabulary."""
    ids = kept.sets.token_ids
    return jnp.any(_is_sent(kept) & ((ids < 0) | (ids >= vocab_size)))


def _rows(kept: KeptRows) -> tuple[Int32[Array, " R"], Bool[Array, " R"]]:
    row = jnp.arange(kept.sets.counts.shape[0], dtype=jnp.int32)
    return row, row < kept.num


def _column(kept: KeptRows) -> Int32[Array, "1 M"]:
    return jnp.arange(kept.sets.token_ids.shape[1], dtype=jnp.int32)[None, :]


def _sizes(kept: KeptRows) -> Int32[Array, " R"]:
    """The ids of each row that are sent; a wrong count sends no more than there are."""
    sizes: jax.Array = jnp.clip(kept.sets.counts, 0, kept.sets.token_ids.shape[1])
    return jnp.where(_rows(kept)[1], sizes, 0)


def _is_sent(kept: KeptRows) -> Bool[Array, "R M"]:
    return _column(kept) < _sizes(kept)[:, None]
