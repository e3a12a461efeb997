"""The definition of `topk_logprobs` in plain `jax.numpy`, exact and with little scratch memory.

Rows are worked on in blocks, so temporaries are those of a block. Where there is more than one, a
loop's trip count follows `num_rows`. How many rows a block has, and how it is read, depends on the
platform that the program is lowered for (`Way`). Within a block:

1. The maxima of contiguous groups of logits, and so each row's maximum.
2. Row statistics: the sum of exponentials, the number of strictly larger logits; for the entropy,
   the sum of s exp(s), s = (x - maximum) / T <= 0: it is log(S) minus this sum over S.
3. Selection of the top K from the K groups with the largest maxima (`selection`).

`backends/answers.py` makes logprobs and token ranks of them, once the shards of a vocabulary have
combined theirs.

Starting an operation on a CPU costs as much as a few thousand logits, and a loop copies each of its
blocks: so small calls are one block. A thread that sleeps is woken in 20 to 50 us, which is as long
as all the work on a row: XLA's runtime hands over whatever is ready in a list of more than eight
operations, and its compiler splits loops that compute more than they read. `in_one_thread` keeps
the operations of few rows together.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.xla import selection
from pallas_kernels.contract.changes import apply
from pallas_kernels.contract.rows import Outputs, Rows, RowSums, no_sums
from pallas_kernels.lowering import forms
from pallas_kernels.lowering.choose import lowered_for

# On a CPU a block's temporaries fit its caches.
CPU_BYTES = 7 << 20
# Elsewhere each operation is a launch, so a block has as many rows as keep any such chip busy.
WIDE_ROWS = 256
# A loop over an unknown number of rows: its start costs as many launches as half of a block.
LOOP_ROWS = 384
TPU_LOOP_ROWS = 512
Result = TypeVar("Result", bound=forms.Tree)


def rows_on_cpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a CPU.

    Args:
      logits: [N, V].
      num_targets: R.
      k: columns to select.
      dynamic: whether the number of rows is known only when the program runs. Then blocks are
        smaller, so that the work follows it.
    """
    if is_symbolic(logits, num_targets):
        return num_targets
    itemsize = logits.dtype.itemsize
    vocabulary = logits.shape[1]
    # The sums and maxima of groups, and the selection.
    bytes_per_row = (
        vocabulary + vocabulary * itemsize // 8 + 8 * selection.selection_size(vocabulary, k)
    )
    copies = 2 * vocabulary * itemsize  # where rows are taken block by block
    if not dynamic and num_targets * bytes_per_row <= CPU_BYTES:
        return num_targets
    bytes_per_row += copies
    rows = max(1, CPU_BYTES // bytes_per_row)
    if dynamic:
        rows = min(rows, max(1, num_targets // 16))  # few are on the list of a decoding step
    rows = min(num_targets, rows)
    return -(-num_targets // -(-num_targets // rows))  # the last block repeats few rows


def rows_on_tpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a TPU; arguments as `rows_on_cpu`."""
    if is_symbolic(logits, num_targets) or not dynamic:
        return num_targets  # the TPU compiler needs no temporaries for them
    return min(num_targets, TPU_LOOP_ROWS)


def rows_on_gpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a GPU; arguments as `rows_on_cpu`."""
    if is_symbolic(logits, num_targets):
        return num_targets
    if dynamic:
        return min(num_targets, LOOP_ROWS)
    # All, if the selection's temporaries take no more than `WIDE_ROWS` rows in float32 would.
    vocabulary = logits.shape[1]
    bytes_per_row = 16 * selection.selection_size(vocabulary, k)
    return min(num_targets, max(WIDE_ROWS, WIDE_ROWS * 4 * vocabulary // bytes_per_row))


def is_symbolic(logits: jax.Array, num_targets: int) -> bool:
    """Whether a number of rows is a dimension variable of `jax.export`: all are one block then."""
    return not (isinstance(num_targets, int) and isinstance(logits.shape[0], int))


def in_one_thread(function: Callable[..., Result], *arguments: forms.Tree) -> Result:
    """function(*arguments), as a list of operations of its own for XLA's runtime."""
    always = forms.barrier(jnp.bool_(True))  # which the compiler does not see through
    return forms.in_branch(always, function, *arguments)


# Few rows of so many logits are made float32 first on a CPU: in 16 bits a loop computes more than
# it reads.
SHORT = 1 << 16
# Pieces of a row that are added at a time on a CPU: of terms with an `exp` each, and of sums. Of
# few rows in float32 fewer are counted: then a loop does not compute more than it reads.
FIRST_PIECES = 8
COUNTED_OF_FEW = 4
MORE_PIECES = 16


Sums = tuple[jax.Array, jax.Array]  # see `sums_on_tpu`


class Given(NamedTuple):
    """What is known of each row, [B]."""

    reference: jax.Array  # float32, subtracted before `exp`: the row's maximum, or 0
    selected: jax.Array  # of the logits' dtype, the given token's logit
    temperatures: jax.Array | None  # float32, usable ones; None: 1


def sums_on_tpu(x: jax.Array, given: Given) -> Sums:
    """The sum of exponentials [B] float32 and the number of larger logits [B] int32 of x [B, V].

    As two reductions of float32, of which the TPU compiler makes one read. A reduction of both at
    once takes up to twice its cycles, and comparisons of 16 bits half more.
    """
    with jax.named_scope("row_statistics"):
        given = given._replace(selected=given.selected.astype(jnp.float32))
        exponentials = jnp.sum(_exponentials(x, given), axis=1)
        larger = jnp.sum(_larger(x.astype(jnp.float32), given), axis=1)
        return exponentials, larger.astype(jnp.int32)


def sums_on_cpu(x: jax.Array, given: Given) -> Sums:
    """`sums_on_tpu`, by adding pieces of each row to one another until one number is left.

    A plain sum over the row is slower (see `pieces`), and a row's logprobs would have other bits in
    another batch.
    """
    with jax.named_scope("row_statistics"):
        # Invalid rows have no sum. Besides, a branch is where XLA copies the block: it would read
        # a slice of the logits number by number in the loops below, five times as slow.
        any_valid = jnp.any(given.reference < jnp.inf)
        return forms.in_branch(any_valid, _added_pieces, x, given)


def _added_pieces(x: jax.Array, given: Given) -> Sums:
    """`sums_on_cpu` of rows of which one may be valid."""
    each: Given = jax.tree.map(lambda one: one[:, None], given)
    cut = [piece[..., None] for piece in forms.pieces(x, FIRST_PIECES, -jnp.inf)]
    exponentials = forms.in_pairs(jnp.add, [_exponentials(one, each)[..., 0] for one in cut])
    if selection.is_small_batch(x) and x.dtype.itemsize == 4:
        cut = [piece[..., None] for piece in forms.pieces(x, COUNTED_OF_FEW, -jnp.inf)]
    larger = forms.in_pairs(jnp.add, [_larger(one, each)[..., 0] for one in cut])
    # Two loops: of both in one, XLA's CPU compiler makes code that takes half as long again.
    both = forms.barrier((exponentials, larger))
    sums, number = (forms.reduced(jnp.add, one, MORE_PIECES, 0) for one in both)
    return sums, number.astype(jnp.int32)


def _exponentials(x: jax.Array, given: Given) -> jax.Array:
    """float32 [..., V] of x [..., V] and `given` [...]."""
    return jnp.exp(_scaled(x, given))


def _scaled(x: jax.Array, given: Given) -> jax.Array:
    """(x - reference) / T, float32 [..., V]."""
    scaled = x.astype(jnp.float32) - given.reference[..., None]
    if given.temperatures is not None:
        # A product is enough inside a sum of exponentials; `answers` divides.
        scaled = scaled * inverse_of(given.temperatures)[..., None]
    return scaled


def inverse_of(temperatures: jax.Array) -> jax.Array:
    """1 / T of usable temperatures; 1 where it is NaN."""
    return jnp.where(jnp.isnan(temperatures), jnp.float32(1), 1 / temperatures)


def _larger(x: jax.Array, given: Given) -> jax.Array:
    """1 where a logit of x [..., V] is larger than the given one [...], else 0, in float32.

    Counted in float32 (exact below 2**24): on a CPU several times faster than in int32.
    """
    larger = forms.strictly_larger(x, given.selected[..., None])
    return jnp.where(larger, jnp.float32(1), jnp.float32(0))


LEAST = -200.0  # the exponential of this is 0 in float32; of -inf, -inf * 0 would be NaN


def weighted_sum(x: jax.Array, given: Given) -> jax.Array:
    """[B] float32 of x [B, V]."""
    with jax.named_scope("row_entropy"):
        return lax.reduce(_terms(x, given), jnp.float32(0), lax.add, dimensions=(1,))  # type: ignore[no-any-return]


def weighted_sum_on_cpu(x: jax.Array, given: Given) -> jax.Array:
    """`weighted_sum`, by adding pieces of each row as `sums_on_cpu` does."""

    def added(x: jax.Array, given: Given) -> jax.Array:
        each: Given = jax.tree.map(lambda one: one[:, None], given)
        terms = [
            _terms(x[..., None], each)[..., 0] for x in forms.pieces(x, FIRST_PIECES, -jnp.inf)
        ]
        return forms.reduced(jnp.add, forms.in_pairs(jnp.add, terms), MORE_PIECES, 0)

    with jax.named_scope("row_entropy"):
        any_valid = jnp.any(given.reference < jnp.inf)
        return forms.in_branch(any_valid, added, x, given)


def _terms(x: jax.Array, given: Given) -> jax.Array:
    """float32 [..., V] of x [..., V] and `given` [...]."""
    scaled = _scaled(x, given)
    return jnp.exp(scaled) * jnp.maximum(scaled, jnp.float32(LEAST))


# The first and last of `RowSums`.
Statistics = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


class Parts(NamedTuple):
    """Of some logits of a row: what `joined` makes one of two of."""

    keys: jax.Array  # `ordered_keys`; the largest
    largest: jax.Array  # float32
    sums: jax.Array  # float32: of exponentials of differences from the largest one, over T
    larger: jax.Array  # float32: how many are larger than the given token's
    inverse: jax.Array  # float32: 1 / T
    weighted: jax.Array | None  # float32: of these by their exponents, for the entropy


def joined(a: Parts, b: Parts) -> Parts:
    """Two parts of a row as one."""
    apart = jnp.where(a.largest == b.largest, jnp.float32(0), jnp.abs(a.largest - b.largest))
    inverse = jnp.maximum(a.inverse, b.inverse)
    moved = -apart * inverse
    factor, a_leads = jnp.exp(moved), a.largest >= b.largest

    def both(mine: jax.Array, other: jax.Array, lead_of: jax.Array, rest: jax.Array) -> jax.Array:
        return jnp.where(a_leads, mine, other) + jnp.where(a_leads, rest, lead_of) * factor

    weighted = None
    if a.weighted is not None and b.weighted is not None:
        least = jnp.maximum(moved, jnp.float32(LEAST))
        of_a, of_b = a.weighted + least * a.sums, b.weighted + least * b.sums
        weighted = both(a.weighted, b.weighted, of_a, of_b)
    return Parts(
        jnp.maximum(a.keys, b.keys),
        jnp.maximum(a.largest, b.largest),
        both(a.sums, b.sums, a.sums, b.sums),
        a.larger + b.larger,
        inverse,
        weighted,
    )


def in_one_read(
    x: jax.Array,
    limit: jax.Array,
    temperatures: jax.Array | None,
    width: int | None,
    entropy: bool,
) -> tuple[Statistics, jax.Array | None]:
    """The statistics of rows x [B, V], and the keys of groups of a width, if there is one.

    Sums are relative to the largest logit so far, so they need no maximum that is known before: one
    exponential a logit, and one read. XLA makes two reads of sums behind a maximum.
    """
    rows, vocabulary = x.shape
    width = width or vocabulary
    whole = -(-vocabulary // width) * width
    x = forms.filled(x, whole, jnp.asarray(-jnp.inf, x.dtype))
    values = x.astype(jnp.float32)
    inverse = jnp.ones((rows,), jnp.float32)
    if temperatures is not None:
        inverse = inverse_of(temperatures)
    given = Given(jnp.zeros((rows,), jnp.float32), limit, None)
    own = Parts(
        forms.ordered_keys(x),
        values,
        jnp.where(values == -jnp.inf, jnp.float32(0), jnp.float32(1)),
        _larger(x, given),
        jnp.broadcast_to(inverse[:, None], x.shape),
        jnp.zeros_like(values) if entropy else None,
    )
    least, zero = jnp.float32(-jnp.inf), jnp.float32(0)
    nothing = Parts(
        forms.key_of(-jnp.inf, x.dtype), least, zero, zero, zero, zero if entropy else None
    )
    with jax.named_scope("row_statistics"):
        tree = jax.tree.structure(own)

        def reduced(parts: Parts) -> Parts:
            def join(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                left, right = (jax.tree.unflatten(tree, x) for x in (a, b))
                return tuple(jax.tree.leaves(joined(left, right)))

            axis = jax.tree.leaves(parts)[0].ndim - 1
            leaves, start = (tuple(jax.tree.leaves(x)) for x in (parts, nothing))
            return jax.tree.unflatten(tree, lax.reduce(leaves, start, join, (axis,)))  # type: ignore[no-any-return]

        groups = reduced(jax.tree.map(lambda y: y.reshape(rows, -1, width), own))
        found = reduced(groups)
    maxima = groups.keys if width < vocabulary else None
    larger = found.larger.astype(jnp.int32)
    return (found.largest, found.sums, larger, found.weighted), maxima


def read_on_cpu(
    x: jax.Array, limit: jax.Array, temperatures: jax.Array | None, width: int | None, entropy: bool
) -> tuple[Statistics, jax.Array | None]:
    """`in_one_read`, from the groups' maxima, which stay in the caches."""
    if width is None:
        maximum, maxima = selection.row_maximum_on_cpu(x), None
    else:
        first = selection.NARROWEST_GROUP
        eights = forms.barrier(selection.group_maxima(x, first))  # else they are computed twice
        maxima = selection.wider(eights, width // first)
        maximum = selection.largest_on_cpu(maxima, x.dtype)
    given = _given(maximum, limit, temperatures)
    weighted = weighted_sum_on_cpu(x, given) if entropy else None
    return (maximum, *sums_on_cpu(x, given), weighted), maxima


def read_on_tpu(
    x: jax.Array, limit: jax.Array, temperatures: jax.Array | None, width: int | None, entropy: bool
) -> tuple[Statistics, None]:
    """`in_one_read` without groups: a TPU would read them in a loop of R * K trips."""
    maximum = selection.row_maximum(x)
    given = _given(maximum, limit, temperatures)
    weighted = weighted_sum(x, given) if entropy else None
    return (maximum, *sums_on_tpu(x, given), weighted), None


def _given(maximum: jax.Array, limit: jax.Array, temperatures: jax.Array | None) -> Given:
    reference = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)
    return Given(reference, limit, temperatures)


class Way(NamedTuple):
    """How a kind of platform reads rows."""

    block_rows: Callable[..., int]  # see `rows_on_cpu`
    read: Callable[..., tuple[Statistics, jax.Array | None]]  # see `in_one_read`
    two_stages: selection.TwoStages | None  # None: the selection has one


CPU = Way(rows_on_cpu, read_on_cpu, selection.from_groups_on_cpu)
GPU = Way(rows_on_gpu, in_one_read, selection.from_groups)
TPU = Way(rows_on_tpu, read_on_tpu, None)
WAYS = {"cpu": CPU, "tpu": TPU, "default": GPU}


def row_sums(rows: Rows, selected: jax.Array, outputs: Outputs) -> RowSums:
    """What is left of rows of logits [N, V], which may be a part of longer ones.

    Args:
      rows: temperatures are usable ones, changes `prepared` and of this part.
      selected: [R] float32, the given token's changed logit, which may be in another part.
      outputs: what is wanted of them.

    Returns:
      The sums; those of rows that are skipped are unspecified.
    """
    run = {name: functools.partial(_row_sums, way, outputs) for name, way in WAYS.items()}
    return lowered_for(
        rows, selected, like=lambda _, selected: no_sums(selected.shape[0], outputs), **run
    )


def _row_sums(way: Way, outputs: Outputs, rows: Rows, selected: jax.Array) -> RowSums:
    num_targets = selected.shape[0]
    # A changed block is a copy.
    small = rows.num_rows is not None or rows.changes is not None
    block = way.block_rows(rows.logits, num_targets, outputs.k, small)

    def work(start: jax.Array) -> RowSums:
        of_rows = rows.changes, rows.temperatures, selected
        changes, temperatures, own = forms.rows_from(of_rows, start, block)
        x = forms.block_of_logits(rows.logits, rows.row_ids, start, block)
        if changes is not None:  # a copy, which is made once
            x = forms.barrier(apply(x, changes))
        return sums_of_block(way, x, own.astype(x.dtype), outputs, temperatures)

    initial = no_sums(num_targets, outputs)
    return forms.map_blocks(work, block, rows.num_rows, initial, (rows, selected))


def sums_of_block(
    way: Way, x: jax.Array, selected: jax.Array, outputs: Outputs, temperatures: jax.Array | None
) -> RowSums:
    """Steps 1 to 3 of a block x [B, V]; selected is [B] of x's dtype.

    x may be a part of longer rows: a row of it that has -inf alone gives a sum of 0.
    """
    k = outputs.k
    width = selection.group_width(x.shape[1], k) if way.two_stages else None
    few = way is CPU and selection.is_small_batch(x)
    if few and x.size <= SHORT:
        x = forms.barrier(x.astype(jnp.float32))

    def statistics_and_maxima(
        x: jax.Array, selected: jax.Array, temperatures: jax.Array | None
    ) -> tuple[Statistics, jax.Array | None]:
        limit = forms.limit_of_count(selected.astype(x.dtype), outputs.inclusive)
        return way.read(x, limit, temperatures, width, outputs.entropy)

    if few:
        wide = selected.astype(jnp.float32)  # one operation fewer out here
        statistics, maxima = in_one_thread(statistics_and_maxima, x, wide, temperatures)
    else:
        statistics, maxima = statistics_and_maxima(x, selected, temperatures)
    maximum, sum_exp, num_larger, weighted = statistics
    top = selection.select_top_k(x, maxima, k, width, way.two_stages)
    return RowSums(maximum, sum_exp, num_larger, *top, weighted)
