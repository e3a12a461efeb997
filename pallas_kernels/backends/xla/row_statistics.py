"""One read of a block of rows: the sum of exponentials and the count of larger logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.xla.block_sizes import is_small_batch
from pallas_kernels.lowering.blocks import Tree, vary_like
from pallas_kernels.numbers.ordered_keys import strictly_larger
from pallas_kernels.numbers.pieces import in_pairs, pieces, reduced

# Pieces of a row that are added at a time on a CPU: of terms with an `exp` each, and of sums.
FIRST_PIECES = 8
MORE_PIECES = 16


Sums = tuple[jax.Array, jax.Array]  # see `sums`


class Given(NamedTuple):
    """What is known of each row, [B]."""

    reference: jax.Array  # float32, subtracted before `exp`: the row's maximum, or 0
    selected: jax.Array  # of the logits' dtype, the given token's logit
    temperatures: jax.Array | None  # float32, usable ones; None: 1


def sums(x: jax.Array, given: Given) -> Sums:
    """The sum of exponentials [B] float32 and the number of larger logits [B] int32 of x [B, V]."""
    with jax.named_scope("row_statistics"):
        zero = jnp.float32(0)
        exponentials, larger = lax.reduce(
            (_exponentials(x, given), _larger(x, given)),
            (zero, zero),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
            dimensions=(1,),
        )
        return exponentials, larger.astype(jnp.int32)


def sums_on_tpu(x: jax.Array, given: Given) -> Sums:
    """`sums`, as two reductions of float32: the TPU compiler makes one read of them.

    A reduction of both at once takes up to twice its cycles, and comparisons of 16 bits half more.
    """
    with jax.named_scope("row_statistics"):
        given = given._replace(selected=given.selected.astype(jnp.float32))
        exponentials = jnp.sum(_exponentials(x, given), axis=1)
        larger = jnp.sum(_larger(x.astype(jnp.float32), given), axis=1)
        return exponentials, larger.astype(jnp.int32)


def sums_on_cpu(x: jax.Array, given: Given) -> Sums:
    """`sums`, by adding pieces of each row to one another until one number is left.

    A plain sum over the row is slower (see `pieces`), and a row's logprobs would have other bits in
    another batch. As a complex number, both sums share a loop.
    """

    def nothing(*inputs: Tree) -> Sums:
        invalid = jnp.full(x.shape[0], jnp.nan, jnp.float32)
        return vary_like((invalid, jnp.zeros(x.shape[0], jnp.int32)), inputs)

    with jax.named_scope("row_statistics"):
        larger = None
        if is_small_batch(x):
            # What a branch is given is in memory: the loop there computes less than it reads.
            x = x.astype(jnp.float32)
            given = given._replace(selected=given.selected.astype(jnp.float32))
            larger = _larger(x, given)
        # Invalid rows have no sum. Besides, a branch is where XLA copies the block: it would read
        # a slice of the logits number by number in the loop below, five times as slow.
        any_valid = jnp.any(given.reference < jnp.inf)
        found: Sums = lax.cond(any_valid, _added_pieces, nothing, x, larger, given)
        return found


def _added_pieces(x: jax.Array, larger: jax.Array | None, given: Given) -> Sums:
    """`sums_on_cpu` of rows of which one may be valid; `larger` is as `_larger`, if it is known."""
    each: Given = jax.tree.map(lambda one: one[:, None], given)
    cut = [piece[..., None] for piece in pieces(x, FIRST_PIECES, -jnp.inf)]
    if larger is None:
        counted = [_larger(piece, each)[..., 0] for piece in cut]
    else:
        counted = pieces(larger, FIRST_PIECES, 0)
    exponentials = [_exponentials(piece, each)[..., 0] for piece in cut]
    both = lax.complex(in_pairs(jnp.add, exponentials), in_pairs(jnp.add, counted))
    both = reduced(jnp.add, both, MORE_PIECES, 0)
    return both.real, both.imag.astype(jnp.int32)


def _exponentials(x: jax.Array, given: Given) -> jax.Array:
    """float32 [..., V] of x [..., V] and `given` [...]."""
    scaled = x.astype(jnp.float32) - given.reference[..., None]
    if given.temperatures is not None:
        # A product is enough inside a sum of exponentials; finish divides.
        usable = ~jnp.isnan(given.temperatures)
        inverse = jnp.where(usable, 1 / given.temperatures, jnp.float32(1))
        scaled = scaled * inverse[..., None]
    return jnp.exp(scaled)


def _larger(x: jax.Array, given: Given) -> jax.Array:
    """1 where a logit of x [..., V] is larger than the given one [...], else 0, in float32.

    Counted in float32 (exact below 2**24): on a CPU several times faster than in int32.
    """
    larger = strictly_larger(x, given.selected[..., None])
    return jnp.where(larger, jnp.float32(1), jnp.float32(0))
