"""A product of hidden states and a head whose logits never leave the chip: an H100's kernel.

Two warpgroups of a program have products of 64 rows and 256 tokens each (`linear_products`), in 128
registers a thread. They reduce them there: to each row's maximum, sum of exponentials, and count of
larger logits than a given one, of each group of 256 tokens.

A logit's bits depend on its row and its token alone: whatever the tile, the same instructions add
the same products in the same order. So `Tiles.diagonal`, which makes the logit of one token of
each row, has the bits of the blocks. (That the matrix unit does so is not promised: the caller
compares.)
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, thread
from pallas_kernels.backends.mosaic_gpu.compat import GPU
from pallas_kernels.backends.mosaic_gpu.linear_products import (
    MULTIPLIERS,
    Finish,
    call,
    products_of,
)
from pallas_kernels.backends.mosaic_gpu.linear_tiles import GROUP, HALF, ROWS, Tiles
from pallas_kernels.backends.mosaic_gpu.pass1_rows import finite_reference
from pallas_kernels.backends.mosaic_gpu.targets import LARGEST, LOG2_E
from pallas_kernels.backends.xla.row_entropy import LEAST


class Rounding(NamedTuple):
    """What makes a logit of a product: scale * product + bias, rounded."""

    scale: float
    dtype: str


class Of(NamedTuple):
    """What the kernel reads; in it, references."""

    hidden: Any  # [R, H] bfloat16 or float16
    head: Any  # [W, H] of the same dtype
    bias: Any  # [W] f32, or None
    given: Any  # [R] f32: counts are of larger logits. NaN: 0
    tokens: Any  # [R] i32: whose logits are written
    inverse: Any  # [R] f32, 1 / T; None: 1
    # [halves, groups] i32: not 0 where a row's token is, or where some tokens do not count.
    special: Any
    limit: Any  # [1] i32: tokens from there on do not count


class Groups(NamedTuple):
    """Of each group and row, [groups * places] f32: see `Tiles.of_rows`."""

    maxima: Any
    sums: Any  # of exp((x - maximum) / T); NaN where there is a NaN or +inf
    larger: Any  # counts
    own: Any  # the logit of the row's token; written where the group has it
    weighted: Any = None  # sums of s exp(s), s = (x - maximum) / T


def group_sums(
    tiles: Tiles, rounding: Rounding, entropy: bool, of: Of, programs: int, interpret: Any = None
) -> Groups:
    """The groups of all rows.

    Args:
      tiles: those of of.hidden and of.head; not `diagonal`.
      rounding: what a logit is.
      entropy: whether `weighted` is wanted.
      of: all but `bias` and `inverse` must be there.
      programs: how many run: `linear_tiles.programs`.
      interpret: None to compile, or `compat.interpret_params(...)`.
    """
    one = compat.shape((tiles.groups * tiles.places,), jnp.float32)
    kernel = functools.partial(_group_sums_kernel, tiles, rounding, programs, interpret is not None)
    found = call(
        tiles, kernel, [one] * (5 if entropy else 4), "linear_groups", programs, interpret
    )(*of)
    return Groups(*found)


def diagonal_logits(
    tiles: Tiles,
    rounding: Rounding,
    hidden: jax.Array,
    head: jax.Array,
    bias: jax.Array | None,
    programs: int,
    interpret: Any = None,
) -> jax.Array:
    """The logit [places] float32 of row i and token i, as it is in `group_sums`.

    Args:
      tiles: `diagonal` ones.
      rounding: what a logit is.
      hidden: [R, H].
      head: [R + 128, H], a token a row, and any.
      bias: [R + 128] float32 or None.
      programs, interpret: as `group_sums` has them.
    """
    one = compat.shape((tiles.places,), jnp.float32)
    kernel = functools.partial(_diagonal_kernel, tiles, rounding, programs, interpret is not None)
    run = call(tiles, kernel, one, "linear_diagonal", programs, interpret)
    found: jax.Array = run(hidden, head, bias)
    return found


def _group_sums_kernel(
    tiles: Tiles, rounding: Rounding, programs: int, interpreted: bool, *refs: Any
) -> None:
    of, out = Of(*refs[: len(Of._fields)]), Groups(*refs[len(Of._fields) :])
    finish = sums_of_tiles(tiles, rounding, of, out, interpreted)
    products_of(tiles, programs, interpreted, of.hidden, of.head, finish)


def sums_of_tiles(
    tiles: Tiles, rounding: Rounding, of: Of, out: Groups, interpreted: bool
) -> Finish:
    """What makes the groups' results of products, in the kernel."""
    limit = of.limit[0]

    def finish(row_tile: Any, group: Any, half: Any, products: jax.Array) -> None:
        row, first = tiles.first_row(row_tile) + half * HALF, tiles.first_token(group)
        x = _logits(rounding, products, of.bias, first, interpreted)
        rows = pl.ds(row, HALF)
        given = _of_rows(of.given, rows, interpreted)
        inverse = None if of.inverse is None else _of_rows(of.inverse, rows, interpreted)
        place = pl.ds(group * tiles.places + row_tile * ROWS + half * HALF, HALF)

        def all_count() -> tuple[jax.Array, ...]:
            return _reduced(x, given, inverse, out.weighted is not None)

        def some_count() -> tuple[jax.Array, ...]:
            mine = _of_rows(of.tokens, rows, interpreted) - first
            part = group * GROUP - first, limit - first
            masked, own = _part_and_own(x, mine, *part, interpreted)
            compat.store(out.own.at[place], own, interpreted)
            return _reduced(masked, given, inverse, out.weighted is not None)

        special = of.special[(row_tile * MULTIPLIERS + half) * tiles.groups + group] != 0
        found = lax.cond(special, some_count, all_count)
        refs = (out.maxima, out.sums, out.larger, out.weighted)
        for ref, values in zip(refs, found, strict=False):
            compat.store(ref.at[place], values, interpreted)

    return finish


def _diagonal_kernel(
    tiles: Tiles,
    rounding: Rounding,
    programs: int,
    interpreted: bool,
    hidden_ref: Any,
    head_ref: Any,
    bias_ref: Any,
    out_ref: Any,
) -> None:
    def finish(row_tile: Any, group: Any, half: Any, products: jax.Array) -> None:
        first = tiles.first_token(group)
        x = _logits(rounding, products, bias_ref, first, interpreted)
        row = compat.iota((HALF,), 0, GPU.Layout.WGMMA.reduce(1)) + half * HALF
        _, own = _part_and_own(x, row, jnp.int32(0), jnp.int32(GROUP), interpreted)
        here = out_ref.at[pl.ds(row_tile * ROWS + half * HALF, HALF)]
        compat.store(here, own, interpreted)

    products_of(tiles, programs, interpreted, hidden_ref, head_ref, finish)


def _logits(
    rounding: Rounding, products: jax.Array, bias_ref: Any, first: Any, interpreted: bool
) -> jax.Array:
    """The logits of a tile's half, as float32."""
    x = products
    if rounding.scale != 1:
        x = x * jnp.float32(rounding.scale)
    if bias_ref is not None:
        here = bias_ref.at[pl.ds(first, GROUP)]
        layout = GPU.Layout.WGMMA.reduce(0)
        bias = here[...] if interpreted else compat.load(here, layout)
        x = x + lax.broadcast_in_dim(bias, x.shape, (1,))
    if rounding.dtype == "float32":
        return x
    if rounding.dtype == "bfloat16" and not interpreted:
        return _through_bfloat16(x)
    return x.astype(rounding.dtype).astype(jnp.float32)


def _through_bfloat16(x: jax.Array) -> jax.Array:
    """x, rounded to bfloat16: two numbers an instruction, where Pallas takes one each."""

    def body(given: Any) -> Any:
        registers = given.registers.copy()
        for i, register in enumerate(registers.flat):
            low, high = (
                thread.llvm.extractelement(register, thread.word(j).value) for j in range(2)
            )
            both = thread.packed_bfloat16(low, high)
            found = register
            for j, half in enumerate((both << 16, both & -65536)):
                found = thread.llvm.insertelement(
                    found, thread.float_of(half).value, thread.word(j).value
                )
            registers.flat[i] = found
        return thread.mgpu.FragmentedArray(
            _registers=registers, _layout=given.layout, _is_signed=None
        )

    layout = GPU.Layout.WGMMA
    found: jax.Array = thread.inline(
        body, (x,), (layout,), thread.result(x.shape, jnp.float32, layout)
    )
    return found


def _part_and_own(
    x: jax.Array, own: jax.Array, begin: Any, end: Any, interpreted: bool
) -> tuple[jax.Array, jax.Array]:
    """x with -inf outside of columns `begin` to `end`; and of each row x in column own [HALF].

    0 where there is no such column. Written for threads: vectors of column numbers would take 64
    registers.
    """
    if interpreted:
        column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        chosen = jnp.where(column == _across(own, x.shape), x, jnp.float32(0))
        inside = (column >= begin) & (column < end)
        return jnp.where(inside, x, jnp.float32(-jnp.inf)), jnp.sum(chosen, axis=1)

    def body(given: Any, wanted: Any, low: Any, high: Any) -> Any:
        # A thread has columns 8 j + 2 (lane % 4) and the next one, for all j, of two rows.
        mine = (thread.thread() & 3) << 1
        low, high = thread.word(low) - mine, thread.word(high) - mine
        columns = [column - mine for column in thread.words(wanted)]
        found = [thread.word(0.0)] * len(columns)
        registers, nothing = given.registers.copy(), thread.word(float("-inf"))
        for i, register in enumerate(registers.flat):
            row, first = i % 2, i // 2 * 8
            for j in range(2):
                at = thread.word(j).value
                value = thread.Word(thread.llvm.extractelement(register, at))
                here = columns[row] == first + j
                found[row] = thread.select(here, value, found[row])
                inside = (low < first + j + 1) & (high > first + j)
                kept = thread.select(inside, value, nothing)
                register = thread.llvm.insertelement(register, kept.value, at)
            registers.flat[i] = register
        kind = thread.mgpu.FragmentedArray
        masked = kind(_registers=registers, _layout=given.layout, _is_signed=None)
        owns = [thread.sum_over_lanes(one, 4) for one in found]
        return masked, thread.vector_like(wanted, owns, integer=False)

    layout = GPU.Layout.WGMMA
    of_rows = layout.reduce(1)
    results = (
        thread.result(x.shape, jnp.float32, layout),
        thread.result((HALF,), jnp.float32, of_rows),
    )
    masked, chosen = thread.inline(
        body, (x, own, begin, end), (layout, of_rows, "scalar", "scalar"), results
    )
    return masked, chosen


def _of_rows(ref: Any, rows: Any, interpreted: bool) -> jax.Array:
    """A vector [HALF] of rows' numbers."""
    if interpreted:
        return compat.asarray(ref[rows])
    return compat.load(ref.at[rows], GPU.Layout.WGMMA.reduce(1))


def _across(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return compat.asarray(lax.broadcast_in_dim(values, shape, (0,)))


def _reduced(
    x: jax.Array, given: jax.Array, inverse: jax.Array | None, entropy: bool
) -> tuple[jax.Array, ...]:
    """The maximum, the sum of exponentials, the count of larger ones, and `weighted`; [HALF]."""
    largest = jnp.max(x, axis=1)
    # The difference is exact near the maximum, however large that is.
    moved = x - _across(finite_reference(largest), x.shape)
    if inverse is None:
        scaled = moved * jnp.float32(LOG2_E)
    else:
        scale = jnp.minimum(inverse * jnp.float32(LOG2_E), jnp.float32(LARGEST))
        scaled = moved * _across(scale, x.shape)
    exponentials = jnp.exp2(scaled)
    larger = jnp.where(x > _across(given, x.shape), jnp.float32(1), jnp.float32(0))
    found = (largest, jnp.sum(exponentials, axis=1), jnp.sum(larger, axis=1))
    if not entropy:
        return found
    terms = exponentials * jnp.maximum(scaled, jnp.float32(LEAST))
    return (*found, jnp.sum(terms, axis=1) * jnp.float32(1 / LOG2_E))
