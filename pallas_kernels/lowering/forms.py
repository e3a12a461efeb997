"""Forms of work on arrays that XLA compiles well, and with the same bits in every program.

Blocks of rows: temporaries are a few blocks and not a few copies.

Logits as integers in the same order. XLA's CPU and TPU programs read subnormal floats as zero, so
they take different subnormal logits for equal; integers keep them apart, and cost two or three
operations at each load.

Reductions of rows by pieces, of which XLA's CPU compiler makes vector code. Of a plain reduction
over a row it makes windows, or a loop that writes every term and another that adds them, in an
order that depends on the number of rows.

A logarithm. XLA computes whole vectors of them in another way than the few that are left over, on a
CPU 1 in 30 differently: a row's logprobs would depend on how many rows a batch has.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float32, Int32

Tree: TypeAlias = "jax.Array | Sequence[Tree] | None"  # of arrays, in tuples and lists

Values = TypeVar("Values", bound=Tree)

Joined = TypeVar("Joined")
Outputs = TypeVar("Outputs", bound=Tree)


def map_blocks(
    work: Callable[[jax.Array], Outputs],
    block: int,
    num_rows: jax.Array | None,
    initial: Outputs,
    inputs: Tree,
) -> Outputs:
    """Call work(start) for each block of rows and put the outputs together.

    Args:
      work: returns the outputs [block, ...] of rows start .. start + block - 1, or of the last
        `block` rows where these reach beyond R, as `lax.dynamic_slice` does.
      block: rows at a time.
      num_rows: int32 scalar; blocks from there on keep `initial`. None: all rows.
      initial: a tree of [R, ...] arrays, R >= block.
      inputs: a tree of the arrays that `work` closes over.
    """
    rows = jax.tree.leaves(initial)[0].shape[0]
    if block == rows:
        return work(jnp.int32(0))

    def step(carry: tuple[jax.Array, Outputs]) -> tuple[jax.Array, Outputs]:
        # The last block may reach beyond the rows. Slices and updates begin early then, all alike:
        # rows done twice get equal values.
        start, done = carry
        updated: Outputs = jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, 0),
            done,
            work(start),
        )
        return start + block, updated

    last = jnp.int32(rows) if num_rows is None else jnp.minimum(num_rows, rows)
    first = (jnp.int32(0), initial)
    _, outputs = lax.while_loop(lambda carry: carry[0] < last, step, vary_like(first, inputs))
    return outputs


def in_branch(taken: jax.Array, function: Callable[..., Outputs], *arguments: Tree) -> Outputs:
    """function(*arguments) in a branch; where it is not taken: NaN, and 0 of what has none.

    XLA's CPU compiler copies what a branch is given, and runs what is in it as a list of its own.
    """

    @jax.jit  # traced once, for its shapes and in the branch
    def run(*arguments: Tree) -> Outputs:
        return vary_like(function(*arguments), arguments)

    def missing(x: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype)

    def nothing(*arguments: Tree) -> Outputs:
        return vary_like(jax.tree.map(missing, jax.eval_shape(run, *arguments)), arguments)  # type: ignore[no-any-return]

    return lax.cond(taken, run, nothing, *arguments)  # type: ignore[no-any-return]


def pin_to_iteration(logits: jax.Array, start: jax.Array) -> jax.Array:
    """The logits as a value of this iteration: else XLA would widen all of them before the loop."""
    return barrier((logits, start))[0]


def rows_from(values: Values, start: jax.Array, block: int) -> Values:
    """Rows start .. start + block of a tree of arrays [R, ...]; if those are all, as they are."""

    def part(x: jax.Array) -> jax.Array:
        return x if x.shape[0] == block else lax.dynamic_slice_in_dim(x, start, block)

    return jax.tree.map(part, values)  # type: ignore[no-any-return]


def block_of_logits(
    logits: jax.Array, row_ids: jax.Array | None, start: jax.Array, block: int
) -> jax.Array:
    """The logits [block, V] of target rows from `start` on, in an iteration of `map_blocks`.

    Args:
      logits: [N, V].
      row_ids: [R] int32, the rows of the targets, clamped to those that there are; None: R = N.
      start, block: which targets.
    """
    if row_ids is not None:
        rows, mine = rows_from(row_ids, start, block), pin_to_iteration(logits, start)
        if block == 1:  # a plain slice: XLA copies it at memory speed on every platform
            return barrier(lax.dynamic_slice_in_dim(mine, rows[0], 1))
        return barrier(mine.at[rows].get(mode="clip"))
    if block == logits.shape[0]:
        return logits
    return rows_from(pin_to_iteration(logits, start), start, block)


def compacted(which: Bool[Array, " N"]) -> tuple[Int32[Array, " N"], Int32[Array, ""]]:
    """The rows that are chosen, in their order, then others; and how many are."""
    # Numbers of which those of the first rows are the largest: XLA:CPU has a call for it.
    number = which.shape[0]
    order = jnp.arange(number, 0, -1, dtype=jnp.float32) + jnp.where(which, number, 0)
    return lax.top_k(order, number)[1], which.sum(dtype=jnp.int32)


def scattered(
    whole: Values, part: Values, index: Int32[Array, " N"], number: Int32[Array, ""]
) -> Values:
    """A tree of arrays [N] with the first `number` of `part`, at rows `index`; none from N on."""
    counts = jnp.arange(index.shape[0], dtype=jnp.int32) < number
    place = jnp.where(counts, index, index.shape[0])
    return jax.tree.map(lambda x, new: x.at[place].set(new, mode="drop"), whole, part)  # type: ignore[no-any-return]


def barrier(values: Values) -> Values:
    """`lax.optimization_barrier`, which has no type annotations."""
    return lax.optimization_barrier(values)  # type: ignore[no-any-return, no-untyped-call]


def vary_like(values: Values, inputs: Tree) -> Values:
    """The values, varying over every mesh axis of `shard_map` over which an input varies.

    A loop's first carry must vary as its inputs do. So must the outputs of a GPU kernel, of which
    JAX knows only shapes.

    Args:
      values: a tree of arrays [...], as is what comes back.
      inputs: another one.
    """
    axes = frozenset[str]().union(*(varying_axes(x) for x in jax.tree.leaves(inputs)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, values)  # type: ignore[no-any-return]


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes of the surrounding `shard_map` over which x may differ."""
    return jax.typeof(x).manual_axis_type.varying  # type: ignore[no-any-return]


def ordered_keys(x: jax.Array) -> jax.Array:
    """Integers of the floats' size in the order of the floats x; -0.0 has the key of 0.0.

    A NaN lies beyond the infinity of its sign. `floats` is the inverse.
    """
    return mirrored(as_integers(x))


def floats(keys: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The floats of `dtype` that have these `ordered_keys`."""
    return lax.bitcast_convert_type(mirrored(keys), dtype)


def key_of(value: float, dtype: DTypeLike) -> jax.Array:
    """The key [] of one value in `dtype`."""
    return ordered_keys(jnp.full((), value, dtype))


def strictly_larger(x: jax.Array, than: jax.Array) -> jax.Array:
    """Where x is larger than `than`, two shapes that broadcast, one dtype. -0.0 equals 0.0.

    Anything where one of them is NaN.
    """
    # Below a negative number the order of the bits is the reverse: one xor turns both sides, which
    # is cheaper than a key for each x. As 0.0, -0.0 is no negative number.
    other = as_integers(floats(ordered_keys(than), than.dtype))
    turned = jnp.where(other < 0, np.iinfo(other.dtype).max, jnp.zeros_like(other))
    return (as_integers(x) ^ turned) > (other ^ turned)


def limit_of_count(selected: jax.Array, inclusive: bool) -> jax.Array:
    """What a logit must be larger than to be counted in a token's rank.

    selected: the token's own logit, in the logits' dtype. Inclusive ranks count equal ones too.
    """
    return just_below(selected) if inclusive else selected


def is_counted(x: jax.Array, selected: jax.Array, inclusive: bool) -> jax.Array:
    """Whether logits are counted, by the floats' own comparison: see `limit_of_count`."""
    return x >= selected if inclusive else x > selected


def just_below(x: jax.Array) -> jax.Array:
    """The next smaller float of x's dtype; anything where x is -inf or NaN."""
    return floats(ordered_keys(x) - 1, x.dtype)


def canonical(x: jax.Array) -> jax.Array:
    """0.0 for -0.0, and -inf for NaN of either sign; every other value keeps its bits."""
    # Not `x == 0`, which is true of a subnormal where XLA flushes it.
    same = floats(ordered_keys(x), x.dtype)
    return jnp.where(jnp.isnan(x), jnp.full_like(x, -jnp.inf), same)


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of floats as signed integers of their size."""
    return lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")


def mirrored(bits: jax.Array) -> jax.Array:
    """Sign and magnitude as two's complement, and back: minus the magnitude for negative ones."""
    sign = jnp.array(np.iinfo(bits.dtype).min, bits.dtype)
    return jnp.where(bits < 0, sign - bits, bits)


def pieces(x: jax.Array, number: int, padding: float) -> list[jax.Array]:
    """x [B, n] cut into `number` pieces [B, ceil(n / number)]; the last ones are padded in front.

    A loop reads what is there and drops it, which XLA's CPU compiler makes four times as fast as
    padding.
    """
    size = x.shape[1]
    width = -(-size // number)
    column = np.arange(width, dtype=np.int32)
    cut = []
    for start in range(0, number * width, width):
        first = min(start, size - width)
        piece = x[:, first : first + width]
        own = column >= start - first
        cut.append(piece if own.all() else jnp.where(own, piece, jnp.asarray(padding, x.dtype)))
    return cut


def filled(x: jax.Array, width: int, value: float | jax.Array) -> jax.Array:
    """x [B, n] with `value` behind each row, up to this width."""
    missing = width - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing)), constant_values=value) if missing else x


def at_place(place: jax.Array, values: Values) -> Values:
    """The entries at one place [B] of each row of a tree of arrays [B, n, ...]; else 0.

    Of numbers of 32 bits, and truth values. One loop for all arrays, where XLA's CPU compiler makes
    two kernels of each gather.
    """
    arrays, tree = jax.tree.flatten(values)
    wide = [x if x.dtype.itemsize == 4 else x.astype(jnp.int32) for x in arrays]
    here = jnp.arange(arrays[0].shape[1], dtype=jnp.int32)[None] == place[:, None]
    here = here.reshape(here.shape + (1,) * (arrays[0].ndim - 2))
    found = summed(*(jnp.where(here, as_integers(x), 0) for x in wide))
    each = (
        lax.bitcast_convert_type(one, x.dtype).astype(own.dtype)
        for one, x, own in zip(found, wide, arrays, strict=True)
    )
    return jax.tree.unflatten(tree, each)  # type: ignore[no-any-return]


def summed(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The sums [B, ...] of integers [B, n, ...] over their second axis, in one loop."""
    zeros = tuple(np.zeros((), x.dtype) for x in arrays)
    return tuple(lax.reduce(arrays, zeros, lambda a, b: tuple(map(lax.add, a, b)), (1,)))


def largest_and_first(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value of each row [B, n], and the lowest id that has it; in one loop.

    XLA's CPU compiler makes three or four kernels of a reduction of one array.
    """

    def better(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return tuple(jnp.where(first, x, y) for x, y in zip(a, b, strict=True))

    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    least = np.asarray(-np.inf if is_float else np.iinfo(values.dtype).min, values.dtype)
    start = least, np.int32(2**31 - 1)
    value, id = lax.reduce((values, ids), start, better, (1,))
    return value, id


def in_pairs(join: Callable[[Joined, Joined], Joined], parts: list[Joined]) -> Joined:
    """The parts joined to one, two at a time."""
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [join(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def reduced(
    join: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, number: int, padding: float
) -> jax.Array:
    """Each row of x [B, n] joined to one value [B], `number` (2**n) pieces at a time."""
    while x.shape[1] > 1:
        x = lax.optimization_barrier(x)  # type: ignore[no-untyped-call]
        x = in_pairs(join, pieces(x, number, padding))
    return x[:, 0]


# Of log((1 + s) / (1 - s)) / s - 2 by s**2, and log(2) in two parts, the first of which is exact in
# a product with an exponent. FreeBSD msun, e_logf.c, http://www.netlib.org/fdlibm/.
SERIES = (0.66666662693, 0.40000972152, 0.28498786688, 0.24279078841)

LOG2 = (0.69313812256, 9.0580006145e-06)

SQRT_HALF = 0x3F3504F3  # as bits


def logarithm(x: Float32[Array | np.ndarray, "*rows"]) -> Float32[Array, "*rows"]:
    """log(x) of normal float32 x > 0, within one unit in the last place; else anything."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - SQRT_HALF) >> 23
    f = lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32) - 1
    s = f / (2 + f)
    z = s * s
    series = jnp.float32(SERIES[-1])
    for coefficient in SERIES[-2::-1]:
        series = jnp.float32(coefficient) + z * series
    # Of a sum of two products a compiler contracts either: one of them is hidden in a maximum.
    half = jnp.maximum(jnp.float32(0.5) * f * f, jnp.float32(0))
    power = exponent.astype(jnp.float32)
    first = jnp.maximum(s * (half + z * series), jnp.float32(-1))
    small = first + power * jnp.float32(LOG2[1])
    return power * jnp.float32(LOG2[0]) - ((half - small) - f)  # type: ignore[no-any-return]
