"""The groups of rows that hold a token with a bias, summed as they are changed.

Pass 1 would take twice as long if it looked for biases. They are few, so it leaves out the tokens
that have one, and the groups of these are read again and summed in pass 1's order: with its bits,
as if it had changed the logits itself. A program takes a block's number of them at a time. Where a
row's programs are a cluster, they share its blocks when they have read the row, which lies in the
second-level cache then (`sum_in_cluster`); else there is a kernel for it (`read_biased`).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends.groups import WIDTH, GroupSums
from pallas_kernels.backends.mosaic_gpu import compat, reading, thread
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import (
    ChangesOfRow,
    RowChanges,
    flat_changes,
)
from pallas_kernels.backends.mosaic_gpu.chosen_groups import Row
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.groups_kernel import maxima_of, sums_of
from pallas_kernels.backends.mosaic_gpu.reading import RowTargets
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUPS_PER_BLOCK,
    RUN,
    Index,
    Schedule,
    choose_read_schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, word
from pallas_kernels.contract.rows import Rows


class Biased(NamedTuple):
    """Which groups are read again, D of each of R rows, and how they are changed.

    Arrays outside a kernel, references inside.
    """

    numbers: jax.Array  # [R * D] i32, distinct ones of a row; -1 where there is none
    changes: RowChanges  # of the R rows


class Replaced(NamedTuple):
    """Groups of R rows that stand in the place of those that pass 1 has left, D of each row.

    Arrays outside a kernel, references inside.
    """

    numbers: jax.Array  # `Biased.numbers`
    maxima: jax.Array  # [R * D] f32
    sums: jax.Array  # [R * D] f32
    weighted: jax.Array | None = None  # [R * D] f32


def biased_of(rows: Rows) -> Biased:
    """The groups that hold a token with a bias, at most one for each bias, whole blocks of them.

    rows: with biases, whole; changes are `prepared`.
    """
    changes = rows.changes
    assert changes is not None
    assert changes.bias_token_ids is not None
    ids = changes.bias_token_ids
    # In order, with those that another place has; a group's last one stands for it.
    numbers = jnp.where(ids < -1, -2 - ids, ids) >> (WIDTH.bit_length() - 1)
    following = jnp.pad(numbers[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    numbers = jnp.where(numbers != following, numbers, -1)
    padding = -ids.shape[1] % GROUPS_PER_BLOCK
    numbers = jnp.pad(numbers, ((0, 0), (0, padding)), constant_values=-1)
    return Biased(numbers.reshape(-1), flat_changes(changes, rows.logits.shape[1]))


def put_biased(groups: GroupSums, replaced: Replaced) -> GroupSums:
    """Groups [R, G] with those of `read_biased` in their places."""
    of_rows: Replaced = jax.tree.map(lambda x: x.reshape(groups.sums.shape[0], -1), replaced)
    numbers, maxima, sums, weighted = of_rows
    row = jnp.arange(len(numbers), dtype=jnp.int32)[:, None]
    places = jnp.where(numbers < 0, groups.sums.shape[1], numbers)  # behind the row: dropped
    return jax.tree.map(  # type: ignore[no-any-return]
        lambda x, y: x.at[row, places].set(y, mode="drop"),
        groups,
        GroupSums(maxima, sums, weighted),
    )


def read_biased(rows: Rows, biased: Biased, *, weighted: bool) -> Replaced:
    """The groups that are read again, by a kernel of their own."""
    num_targets, (num_rows, width) = rows.num_targets, rows.logits.shape
    schedule = choose_read_schedule(num_targets, width, rows.logits.dtype.name)
    count = biased.numbers.shape[0] // num_targets
    types = replaced_types(biased, weighted=weighted)
    kernel = GPU.kernel(
        functools.partial(_biased_groups_kernel, schedule=schedule, num_rows=num_rows, count=count),
        out_type=types,
        grid=(count // GROUPS_PER_BLOCK, num_targets),
        grid_names=("block", "row"),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="biased_groups",
    )
    targets = reading.make_targets(rows.row_ids, rows.num_rows, rows.temperatures)
    results = kernel(rows.logits.reshape(-1), biased, targets)
    return Replaced(biased.numbers, *results)


def replaced_types(biased: Biased, *, weighted: bool) -> list[jax.ShapeDtypeStruct]:
    """The types of `Replaced` without the numbers, and without what is None."""
    kind = compat.shape(biased.numbers.shape, jnp.float32)
    return [kind] * (3 if weighted else 2)


def _biased_groups_kernel(
    logits_ref: jax.Ref,  # [N * V]  in
    biased: Biased,  # in
    targets: RowTargets,  # in
    *out_refs: jax.Ref,  # `replaced_types`  out
    schedule: Schedule,
    num_rows: int,
    count: int,
) -> None:
    target, block = lax.axis_index("row"), lax.axis_index("block")
    logits_row, _ = targets.row(target)
    inverse = reading.inverse_in_kernel(targets.temperature(target))
    first = jnp.clip(logits_row, 0, num_rows - 1) * schedule.vocabulary
    row = Row(schedule, logits_ref, first, biased.changes, target)
    _sum_block(row, reading.exponents_scale(inverse), biased, out_refs, block, count)


def sum_in_cluster(
    row: Row,
    scale: jax.Array,
    biased: Biased,
    out_refs: tuple[jax.Ref, ...],
    program: Index,
    num_targets: int,
) -> None:
    """The work of a program of a row's cluster: every so many blocks of the row's are its own.

    Args:
      row: of logits, and their changes.
      scale: of exponents.
      biased: of R target rows.
      out_refs: `replaced_types`.
      program: its number among the row's.
      num_targets: R.
    """
    count, programs = biased.numbers.shape[0] // num_targets, row.schedule.programs
    blocks = count // GROUPS_PER_BLOCK

    def turn(i: jax.Array, _: None) -> None:
        _sum_block(row, scale, biased, out_refs, program + i * programs, count)

    lax.fori_loop(0, (blocks - program + (programs - 1)) // programs, turn, None)


def _sum_block(
    row: Row,
    scale: jax.Array,
    biased: Biased,
    out_refs: tuple[jax.Ref, ...],
    block: Index,
    count: int,
) -> None:
    """Sum a block's number of a row's groups, of whose numbers there are so many."""
    begin = row.number * count + block * GROUPS_PER_BLOCK
    numbers, places = _numbers(row, biased.numbers, begin, block)
    pieces = _pieces(row, numbers, places)
    largest = maxima_of(pieces)
    (sums,), weighted = sums_of(
        pieces, largest, (scale,), row.layout, weighted=len(out_refs) > 2
    )  # fmt: skip
    results = [largest.astype(jnp.float32), sums, *([] if weighted is None else [weighted])]
    for ref, values in zip(out_refs, results, strict=True):
        compat.store_some(ref, begin, GROUPS_PER_BLOCK, values)


def _pieces(row: Row, numbers: jax.Array, places: jax.Array) -> list[jax.Array]:
    """`Row.pieces` float32 of the groups of these numbers; places of their last biases.

    All that a thread needs is loaded before it waits for any of it.
    """
    schedule, layout, changes = row.schedule, row.layout, row.changes
    assert changes is not None
    references, tree = jax.tree.flatten(changes)
    (groups, width), vocabulary = schedule.piece, schedule.vocabulary

    def body(
        logits: Value, first: Vector, number: Vector, groups: Vector, places: Vector, *given: Value
    ) -> tuple[Vector, ...]:
        (group,), (place,) = thread.words(groups), thread.words(places)
        column = (thread.thread() & (width // RUN - 1)) * RUN
        begin = thread.larger(group, 0) * WIDTH + column
        tokens = [begin + i for i in range(0, WIDTH, width)]
        here = jax.tree.unflatten(tree, given)
        words = reading.mask_words(schedule)
        of_row = ChangesOfRow(here, word(number), words, tokens, RUN)
        of_row = of_row._replace(near=of_row.places_before(place))
        masks = [of_row.load(ref) for ref in (here.allowed, here.unbiased)]
        runs = [
            [
                thread.load_run(
                    logits,
                    word(first) + thread.smaller(token + i, vocabulary - row.vector),
                    row.vector,
                )
                for i in range(0, RUN, row.vector)
            ]
            for token in tokens
        ]
        thread.sync_threads()  # which no load passes: else some would wait for others
        allowed, plain = map(of_row.bits, masks)
        vectors = [thread.vector_of(run, layout, schedule.piece) for run in runs]
        logits_here = [
            thread.as_float32(x.value) for vector in vectors for x in thread.words(vector)
        ]
        for i, x in enumerate(logits_here):
            token = tokens[i // RUN] + i % RUN // row.vector * row.vector
            is_set = (group >= 0) & (token < vocabulary) & ((allowed & (1 << i)) != 0)
            logits_here[i] = thread.select(is_set, x, -math.inf)
        logits_here = of_row.with_biases(logits_here, allowed & ~plain)
        each = len(logits_here) // len(runs)
        parts = (logits_here[i : i + each] for i in range(0, len(logits_here), each))
        return tuple(thread.floats_like(x, part) for x, part in zip(vectors, parts, strict=True))

    kind = thread.result((groups, width), jnp.float32, layout)
    arguments = row.logits_ref, row.first, row.number, numbers, places, *references
    of_group = layout.reduce(1)
    layouts = None, "scalar", "scalar", of_group, of_group, *[None] * len(references)
    return list(thread.inline(body, arguments, layouts, (kind,) * (WIDTH // width)))


def _numbers(
    row: Row, numbers_ref: Readable, begin: Index, block: Index
) -> tuple[jax.Array, jax.Array]:
    """A block's group numbers [groups], as `Row.pieces` takes them, and their places in the row."""
    layout = row.layout.reduce(1)
    lanes = (row.schedule.piece[1] // RUN).bit_length() - 1

    def body(numbers: Value, begin: Vector, block: Vector) -> tuple[Vector, ...]:
        slot = thread.thread() >> lanes
        of_slot = (
            word(thread.load(numbers, word(begin) + slot)),
            word(block) * GROUPS_PER_BLOCK + slot,
        )
        return tuple(thread.one_each(x, layout, (GROUPS_PER_BLOCK,), signed=True) for x in of_slot)

    kind = thread.result((GROUPS_PER_BLOCK,), jnp.int32, layout)
    arguments, layouts = (numbers_ref, begin, block), (None, "scalar", "scalar")
    group_numbers, places = thread.inline(body, arguments, layouts, (kind, kind))
    return group_numbers, places
