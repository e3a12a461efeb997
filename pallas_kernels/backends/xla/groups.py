"""One read of rows that are sampled: their groups' sums, and the largest of their logits.

`group_sums` says what a group's sum is. Beside it, a row that is to be cut (top-k, top-p, min-p)
needs candidates, and raw logprobs need the top K and the sums at temperature 1: the same read
gives them all, and each block of rows pays for what its rows need.
"""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import choose, sampled_on_tpu
from pallas_kernels.backends.xla import group_sums, selection
from pallas_kernels.backends.xla.group_sums import EIGHT, WIDTH, GroupSums
from pallas_kernels.backends.xla.on_cpu.selection_on_cpu import from_groups_on_cpu
from pallas_kernels.lowering import blocks
from pallas_kernels.lowering.computed_once import computed_once
from pallas_kernels.lowering.cuda_kernel import on_cuda
from pallas_kernels.lowering.platforms import lowered_for
from pallas_kernels.numbers.ordered_keys import as_integers, strictly_larger

FEW = 64  # candidates: most rows that are cut need no more
MANY = 128
# Rows of a list that may be short, at a time: the work follows its length, and rows are copied.
LISTED_ON_CPU, LISTED = 4, 32


class Part(NamedTuple):
    """A device's part of N rows of logits, as groups: `whole` ones, then those of `tail`."""

    logits: Float[Array, "N _"]  # its columns
    tail: Float[Array, "N T W"]  # the groups that its columns do not hold whole
    offset: Int32[Array, ""]  # the column where its first group begins


class Read(NamedTuple):
    """What is left of R rows after the read. K is the most columns that a row may have."""

    groups: GroupSums  # [R, G], at each row's temperature
    raw_sums: Float32[Array, "R _"]  # the sums at temperature 1, where they were asked for
    top_ids: Int32[Array, "R K"]  # columns of the part; -1 where a row has no more, or none needed
    top_logits: Float32[Array, "R K"]  # descending, ties lowest id first


class Top(NamedTuple):
    """The largest of R rows."""

    ids: Int32[Array, "R K"]
    logits: Float32[Array, "R K"]


# How many rows of logits to work on at a time: `blocks.rows_on_cpu` and its like.
Size = Callable[[jax.Array, int, int, bool], int]
Outputs = TypeVar("Outputs")  # a tree of arrays [R, ...]


def whole_groups(part: Part) -> int:
    """How many groups from `offset` on the columns hold whole."""
    width = part.logits.shape[1]
    # A last group that may be cut, or not, by the offset of this device is in the tail.
    return width // WIDTH - (part.tail.shape[1] == 2)


def read(part: Part, inverse: Float32[Array, " N"], needed: Int32[Array, " N"], k: int) -> Read:
    """Read all rows.

    Args:
      part: the logits.
      inverse: `group_sums.inverse_temperature` of each row.
      needed: how many candidates each row needs; at most `MANY` are given.
      k: static; the top k of every row and the sums at temperature 1 are wanted too. -1: neither.
    """
    arguments = (*part, inverse, needed)
    cpu, tpu, default = (
        functools.partial(_read, size, k)
        for size in (blocks.rows_on_cpu, blocks.rows_on_tpu, blocks.rows_on_gpu)
    )
    like = functools.partial(_like, k)
    return lowered_for(*arguments, like=like, cpu=cpu, tpu=tpu, default=default)


def _like(k: int, *arguments: jax.Array) -> Read:
    part = Part(*arguments[:3])
    shape = len(part.logits), whole_groups(part) + part.tail.shape[1]
    columns = len(part.logits), _columns(part, k)
    zeros = jnp.zeros(shape, jnp.float32)
    raw = zeros if k >= 0 else jnp.zeros((shape[0], 0), jnp.float32)
    missing = jnp.full(columns, -1, jnp.int32), jnp.full(columns, -jnp.inf, jnp.float32)
    return Read(GroupSums(zeros, zeros), raw, *missing)


def _columns(part: Part, k: int) -> int:
    return min(max(k, MANY), part.logits.shape[1])


def _read(size: Size, k: int, *arguments: jax.Array) -> Read:
    part, (inverse, needed) = Part(*arguments[:3]), arguments[3:]
    initial = _like(k, *arguments)

    def work(x: jax.Array, tail: jax.Array, inverse: jax.Array, needed: jax.Array) -> Read:
        is_tpu = size is blocks.rows_on_tpu
        return _of_block(Part(x, tail, part.offset), inverse, needed, k, is_tpu)

    rows = (part.tail, inverse, needed)
    return in_blocks(work, size, part.logits, rows, initial, min(max(k, FEW), part.logits.shape[1]))


def _of_block(
    part: Part, inverse: jax.Array, needed: jax.Array, k: int, is_tpu: bool = False
) -> Read:
    """`read` of a block of rows."""
    x = part.logits
    vocabulary, columns = x.shape[1], _columns(part, k)
    eights = blocks.barrier(selection.group_maxima(x, EIGHT))
    mine = eights if part.tail.shape[1] < 2 else None
    groups = group_sums.of_block(columns_of_groups(part), part.tail, inverse, mine)
    groups = groups._replace(sums=computed_once(groups.sums))
    raw = jnp.zeros((len(x), 0), jnp.float32)
    if k >= 0:
        once = jnp.ones_like(inverse)
        raw = lax.cond(
            jnp.all(inverse == 1),
            lambda: groups.sums,
            # Its own columns: what a branch is given is copied, a slice too.
            lambda: group_sums.of_block(columns_of_groups(part), part.tail, once, mine).sums,
        )

    def select(count: int) -> tuple[jax.Array, jax.Array]:
        if is_tpu:
            return sampled_on_tpu.largest(x, count)
        width = selection.group_width(vocabulary, count)
        keys = None if width is None else selection.wider(eights, width // EIGHT)
        two_stages = functools.partial(from_groups_on_cpu, eights=eights)
        return selection.select_top_k(x, keys, count, width, two_stages)

    def top(count: int) -> tuple[jax.Array, jax.Array]:
        ids, logits = select(count)
        more = ((0, 0), (0, columns - count))
        found = (
            jnp.pad(ids, more, constant_values=-1),
            jnp.pad(logits, more, constant_values=-jnp.inf),
        )
        return blocks.vary_like(found, x)

    counts = sorted({min(max(k, 0, count), columns) for count in (0, FEW, MANY)})
    enough = jnp.asarray(list(counts[:-1]), jnp.int32)
    most = jnp.max(needed)
    index = jnp.sum(most > enough, dtype=jnp.int32)
    found = lax.switch(index, [functools.partial(top, count) for count in counts])
    return Read(groups, raw, *found)


def as_many_as_needed(
    logits: jax.Array, needed: jax.Array, k: int, top: Callable[[int], Top]
) -> Top:
    """The largest logits, as many as the row needs that needs most: none, `FEW` or `MANY`."""
    rows, columns = len(logits), min(max(k, MANY), logits.shape[1])
    counts = sorted({min(max(k, 0, count), columns) for count in (0, FEW, MANY)})

    def padded(count: int) -> Top:
        ids = jnp.full((rows, columns), -1, jnp.int32)
        values = jnp.full((rows, columns), -jnp.inf, jnp.float32)
        if not count:
            return blocks.vary_like(Top(ids, values), (logits, needed))
        found = top(count)
        return Top(ids.at[:, :count].set(found.ids), values.at[:, :count].set(found.logits))

    if len(counts) == 1:
        return padded(counts[0])
    enough = jnp.asarray(counts[:-1], jnp.int32)
    index = jnp.sum(jnp.max(needed) > enough, dtype=jnp.int32)
    found: Top = lax.switch(index, [lambda count=count: padded(count) for count in counts])
    return found


def columns_of_groups(part: Part) -> jax.Array:
    """The columns [N, 256 G'] of the whole groups."""
    width = whole_groups(part) * WIDTH
    if part.tail.shape[1] < 2:  # they begin with the first column
        return part.logits[:, :width]
    return lax.dynamic_slice_in_dim(part.logits, part.offset, width, axis=1)


def candidates(
    logits: Float[Array, "N V"],
    k: int,
    row_ids: Int32[Array, " R"],
    num_rows: Int32[Array, ""],
    *,
    valid: bool,
) -> tuple[Int32[Array, "R K"], Float32[Array, "R K"]]:
    """The k largest logits of rows, and their ids; see `selection.select_top_k`.

    Args:
      logits: the rows.
      k: static.
      row_ids, num_rows: which rows; from `num_rows` on, the results are anything.
      valid: static; whether these rows are. The GPU kernels, which find nothing in others, are for
        valid rows.
    """
    cpu, default = (
        functools.partial(_candidates, k, size) for size in (blocks.rows_on_cpu, blocks.rows_on_gpu)
    )
    like = functools.partial(_like_candidates, k)

    def tpu(logits: jax.Array, row_ids: jax.Array, num_rows: jax.Array) -> Top:
        found = Top(*sampled_on_tpu.largest(logits, k, row_ids, num_rows))
        return blocks.vary_like(found, (logits, row_ids, num_rows))

    def kernels(*arguments: jax.Array) -> Top:
        run = importlib.import_module("pallas_kernels.backends.mosaic_gpu.sampled")
        found: Top = run.candidates(*arguments, k)
        return found

    fits = valid and choose.shape_obstacle(logits) is None
    cuda = on_cuda(kernels, default) if fits else default
    arguments = logits, row_ids, num_rows
    found: Top = lowered_for(*arguments, like=like, cpu=cpu, tpu=tpu, cuda=cuda, default=default)
    return found


def _like_candidates(k: int, _: jax.Array, row_ids: jax.Array, *__: jax.Array) -> Top:
    shape = len(row_ids), k
    return Top(jnp.full(shape, -1, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32))


def _candidates(k: int, size: Size, *arguments: jax.Array) -> Top:
    logits, row_ids, num_rows = arguments
    width = selection.group_width(logits.shape[1], k)

    def work(x: jax.Array) -> Top:
        keys, two_stages = None, from_groups_on_cpu
        if width is not None:
            eights = blocks.barrier(selection.group_maxima(x, EIGHT))
            keys = selection.wider(eights, width // EIGHT)
            two_stages = functools.partial(from_groups_on_cpu, eights=eights)
        return Top(*selection.select_top_k(x, keys, k, width, two_stages))

    initial = _like_candidates(k, *arguments)
    return in_blocks(work, size, logits, (), initial, k, row_ids, num_rows)


class _Count(NamedTuple):
    larger: Int32[Array, " R"]


def num_larger(
    logits: Float[Array, "N V"],
    than: Float32[Array, " R"],
    row_ids: Int32[Array, " R"],
    num_rows: Int32[Array, ""],
) -> Int32[Array, " R"]:
    """How many logits of row `row_ids[r]` are strictly larger than `than[r]`."""

    def like(_: jax.Array, than: jax.Array, *__: jax.Array) -> _Count:
        return _Count(jnp.zeros(len(than), jnp.int32))

    found: _Count = lowered_for(
        logits, than, row_ids, num_rows, like=like, cpu=_num_larger_on_cpu, default=_num_larger
    )
    return found.larger


def _num_larger(
    logits: jax.Array, than: jax.Array, row_ids: jax.Array, num_rows: jax.Array
) -> _Count:
    def work(x: jax.Array, than: jax.Array) -> _Count:
        larger = strictly_larger(x, than[:, None].astype(x.dtype))
        return _Count(larger.sum(axis=1, dtype=jnp.int32))

    initial = _Count(jnp.zeros(len(than), jnp.int32))
    return in_blocks(work, blocks.rows_on_gpu, logits, (than,), initial, 0, row_ids, num_rows)


def _num_larger_on_cpu(
    logits: jax.Array, than: jax.Array, row_ids: jax.Array, num_rows: jax.Array
) -> _Count:
    def work(start: jax.Array) -> _Count:
        row = lax.dynamic_slice_in_dim(row_ids, start, 1)
        x = _row_on_cpu(blocks.tied(logits, start), row[0])
        least = lax.dynamic_slice_in_dim(than, start, 1)[0].astype(logits.dtype)
        larger = strictly_larger(x, least)
        return _Count(_number_of(larger)[None])

    initial = _Count(jnp.zeros(len(than), jnp.int32))
    return blocks.map_blocks(work, 1, num_rows, initial, (logits, than, row_ids))


def _row_on_cpu(logits: Float[Array, "N V"], row: jax.Array) -> Float[Array, " V"]:
    """One row of the logits, in the form that costs XLA's CPU programs least."""
    if logits.dtype.itemsize == 4:  # of a plain slice the compiler knows that it reads little
        return lax.dynamic_slice_in_dim(logits, row, 1)[0]
    # As integers: a slice of bfloat16 would be widened and rounded again.
    bits = lax.dynamic_slice_in_dim(as_integers(logits), row, 1)[0]
    return lax.bitcast_convert_type(bits, logits.dtype)


def _number_of(flags: Bool[Array, " V"]) -> Int32[Array, ""]:
    """How many are true. XLA's CPU compiler vectorizes a sum of pieces, and no sum of a row."""
    pieces = 32
    width = len(flags) // pieces
    parts = [flags[i * width : (i + 1) * width] for i in range(pieces)]
    first = functools.reduce(jnp.add, [part.astype(jnp.int32) for part in parts])
    found: jax.Array = first.sum(dtype=jnp.int32) + flags[pieces * width :].sum(dtype=jnp.int32)
    return found


def in_blocks(
    work: Callable[..., Outputs],
    size: Size,
    logits: jax.Array,
    rows: tuple[jax.Array, ...],
    initial: Outputs,
    k: int,
    row_ids: jax.Array | None = None,
    num_rows: jax.Array | None = None,
    listed: int = LISTED,
) -> Outputs:
    """`work(x [B, V], *rows)` of blocks of rows, put together; see `blocks.map_blocks`.

    listed: how many rows of a list are copied at a time, but on a CPU.
    """
    num_targets = jax.tree.leaves(initial)[0].shape[0]
    block = size(logits, num_targets, k, num_rows is not None)
    if num_rows is not None:
        block = min(block, LISTED_ON_CPU if size is blocks.rows_on_cpu else listed)

    def of(start: jax.Array) -> tuple[jax.Array, ...]:
        def part(x: jax.Array) -> jax.Array:
            return x if block == num_targets else lax.dynamic_slice_in_dim(x, start, block)

        if row_ids is not None:
            chosen = part(row_ids)
            x = blocks.barrier(blocks.tied(logits, start).at[chosen].get(mode="clip"))
        elif block == num_targets:
            x = logits
        else:
            x = part(blocks.tied(logits, start))
        given = tuple(part(one) for one in rows)
        like = jax.eval_shape(leaves_of_work, x, *given)

        def nothing(*_: jax.Array) -> tuple[jax.Array, ...]:
            zeros: tuple[jax.Array, ...] = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
            return blocks.vary_like(zeros, (x, given))

        # A branch is where XLA copies the block: without, it is read number by number.
        done: tuple[jax.Array, ...] = lax.cond(start >= 0, leaves_of_work, nothing, x, *given)
        return done

    @jax.jit  # traced once, for its shapes and in the branch
    def leaves_of_work(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        return blocks.vary_like(tuple(jax.tree.leaves(work(*arguments))), arguments)

    flat, tree = jax.tree.flatten(initial)
    found = blocks.map_blocks(of, block, num_rows, tuple(flat), (logits, *rows))
    outputs: Outputs = jax.tree.unflatten(tree, found)
    return outputs
