"""What one read of a row leaves for drawing from it: a maximum and a sum of each group.

A group is 256 tokens, from a multiple of 256 on. Its sum is that of exp((x - maximum) / T), in
float32 and relative to the group's own maximum, so no other group is needed for it. Neither groups
nor the order of addition depend on the rows beside it, on V, K, dtype, or on how rows are split
over devices: lane l of 32 is ((t0 + t1) + (t2 + t3)) + ((t4 + t5) + (t6 + t7)) of the terms
ti = t[32 i + l]; four lanes l, l + 8, l + 16, l + 24 are added in pairs, then the eight that are
left, in pairs. The kernels (`mosaic_gpu/groups_kernel.py`, `mosaic_tpu/groups.py`) have orders of
their own, fixed too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.backends.groups import WIDTH, GroupSums
from pallas_kernels.backends.xla import selection
from pallas_kernels.lowering import forms, row_pieces
from pallas_kernels.numbers import ordered_keys
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.ordered_keys import floats

EIGHT = selection.NARROWEST_GROUP
FIRST_LANES, MORE_LANES = 32, EIGHT
SHORT = (8, 32, 64, 128, 256)  # widths of a group that may be cut off where only -inf follows


# A program has many, of few shapes.
@functools.partial(jax.jit, static_argnames=("few", "one_loop"))
def _sums_of(
    tokens: Float[Array, "*groups W"],
    maxima: Float32[Array, "*groups"],
    inverse: Float32[Array, "..."],
    few: bool = False,
    one_loop: bool = False,
) -> Float32[Array, "*groups"]:
    """The sums of groups of W logits, one of `SHORT`; -inf where there is no token."""
    finite = jnp.where(maxima > -jnp.inf, maxima, jnp.float32(0))  # of -inf alone, or NaN

    @jax.jit
    def terms(part: jax.Array) -> jax.Array:
        x = part.astype(jnp.float32) - finite[..., None]
        return exponential(x * inverse[..., None])

    if few:
        return added(forms.barrier(terms(tokens)))
    return _added([terms(part) for part in _parts(tokens, FIRST_LANES)], one_loop)


_LEAST = -200.0  # the exponential of this is 0 in float32; of -inf, -inf * 0 would be NaN


@jax.jit
def weighted_sums_of(
    tokens: Float[Array, "*groups W"],
    maxima: Float32[Array, "*groups"],
    inverse: Float32[Array, "..."],
) -> Float32[Array, "*groups"]:
    """The sums of s exp(s), s = (x - maximum) / T, in the order of `_sums_of`: at most 0."""
    finite = jnp.where(maxima > -jnp.inf, maxima, jnp.float32(0))

    def terms(part: jax.Array) -> jax.Array:
        s = (part.astype(jnp.float32) - finite[..., None]) * inverse[..., None]
        return exponential(s) * jnp.maximum(s, jnp.float32(_LEAST))

    return _added([terms(part) for part in _parts(tokens, FIRST_LANES)])


def added(terms: Float32[Array, "*groups W"]) -> Float32[Array, "*groups"]:
    """The sum of each group's terms, in the order that this file says."""
    return _added(_parts(terms, FIRST_LANES))


def _added(pieces: list[jax.Array], one_loop: bool = False) -> jax.Array:
    """The sum of terms that come in pieces of `FIRST_LANES`."""
    keep_together = forms.in_one_loop if one_loop else forms.barrier
    lanes = keep_together(row_pieces.in_pairs(jnp.add, pieces))
    lanes = forms.barrier(row_pieces.in_pairs(jnp.add, _parts(lanes, MORE_LANES)))
    sums = row_pieces.in_pairs(jnp.add, _parts(lanes, 1))[..., 0]
    return sums[:, :-1] if one_loop else sums


def _maxima_of(
    tokens: Float[Array, "*groups W"], one_loop: bool = False
) -> Float32[Array, "*groups"]:
    """The largest of each group of W logits, but for a negative NaN, which may be overlooked."""
    keys = ordered_keys.ordered_keys(tokens)
    if one_loop:
        keys = forms.in_one_loop(functools.reduce(jnp.maximum, _parts(keys, FIRST_LANES)))
    keys = _largest(keys, (FIRST_LANES, MORE_LANES, 1))
    if one_loop:
        keys = keys[:, :-1]
    return floats(keys, tokens.dtype).astype(jnp.float32)


def sums_of_groups(tokens: Float[Array, "*groups W"], inverse: Float32[Array, "..."]) -> GroupSums:
    """Groups of W logits each, wherever they come from; -inf where there is no token.

    Args:
      tokens: the logits.
      inverse: `inverse_temperature` of each group, or of shapes that broadcast.
    """
    maxima = _maxima_of(tokens)
    return GroupSums(
        maxima, _sums_of(tokens, maxima, jnp.broadcast_to(inverse, maxima.shape), few=True)
    )


def of_block(
    x: Float[Array, "B N"],
    tail: Float[Array, "B T W"],
    inverse: Float32[Array, " B"],
    eights: jax.Array | None = None,
    *,
    weighted: bool = False,
    one_loop: bool = False,
) -> GroupSums:
    """The groups of a block of rows: N / 256 whole ones, then those of `tail`.

    Args:
      x: the logits of whole groups.
      tail: T groups that are not whole, filled up with -inf.
      inverse: `inverse_temperature` of each row.
      eights: where they are known, the `ordered_keys` of the largest of eight logits each, of x
        and, from x.shape[1] / 8 on, of what the tail has.
      weighted: whether the sums for the entropy are wanted.
      one_loop: whether whole groups are so few that one thread of a CPU has them done before
        another is awake; see `forms.in_one_loop`.
    """
    num_whole = x.shape[1] // WIDTH
    parts = [x.reshape(x.shape[0], num_whole, WIDTH), tail]
    if eights is None:
        maxima = [_maxima_of(parts[0], one_loop), _maxima_of_few(tail)]
    else:
        largest = _eights_to_groups(eights, x.dtype)
        maxima = [largest[:, :num_whole], largest[:, num_whole:]]
    there = [
        (part, largest_of_part)
        for part, largest_of_part in zip(parts, maxima, strict=True)
        if part.shape[1]
    ]
    # A tail is short: its terms are one text to compile, and those of whole groups one a piece.
    sums = [
        _sums_of(
            part,
            largest_of_part,
            inverse[:, None],
            few=part is tail,
            one_loop=one_loop and part is not tail,
        )
        for part, largest_of_part in there
    ]
    groups = GroupSums(_joined([largest_of_part for _, largest_of_part in there]), _joined(sums))
    if not weighted:
        return groups
    more = [
        weighted_sums_of(part, largest_of_part, inverse[:, None]) for part, largest_of_part in there
    ]
    return groups._replace(weighted=_joined(more))


def _maxima_of_few(tokens: Float[Array, "B T W"]) -> Float32[Array, "B T"]:
    """As `_maxima_of`, by one loop."""
    keys = ordered_keys.ordered_keys(tokens)
    largest = row_pieces.largest_key(keys.reshape(-1, keys.shape[2])).reshape(keys.shape[:2])
    return floats(largest, tokens.dtype).astype(jnp.float32)


def _eights_to_groups(keys: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The largest logit [B, G] float32 of each group, from the keys of those of eight each."""
    rows, eights = keys.shape[0], WIDTH // EIGHT
    padding = -keys.shape[1] % eights
    if padding:
        least = jnp.full((rows, padding), np.iinfo(keys.dtype).min, keys.dtype)
        keys = jnp.concatenate([keys, forms.vary_like(least, keys)], axis=1)  # a pad is slow
    lanes = forms.barrier(keys).reshape(rows, -1, eights // MORE_LANES, MORE_LANES).max(axis=2)
    return floats(forms.barrier(lanes).max(axis=2), dtype).astype(jnp.float32)


def _largest(x: jax.Array, lanes: tuple[int, ...]) -> jax.Array:
    """x [..., n] -> [...], by ever fewer lanes: XLA's CPU compiler vectorizes that."""
    for width in lanes:
        x = forms.barrier(functools.reduce(jnp.maximum, _parts(x, width)))
    return x[..., 0]


def _parts(x: jax.Array, lanes: int) -> list[jax.Array]:
    """x [..., n] cut into pieces of so many lanes."""
    return [x[..., i : i + lanes] for i in range(0, x.shape[-1], lanes)]


def _joined(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
