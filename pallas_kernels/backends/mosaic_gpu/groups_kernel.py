"""Pass 1 on a GPU: one read of each row yields each group's maximum and sum of exponentials.

A group is 256 logits from a multiple of 256 on, in every row, and its sum is relative to its own
maximum: so no program keeps anything of its groups but what it writes. The order of additions is
fixed by the places of logits in their group: a thread adds the four runs of 8 logits that it holds,
64 apart, then the 8 sums, then 8 threads theirs, always in pairs. So a sum's bits depend on the
group's logits and the temperature alone; not on rows, dtype, vectors, programs, or the row's place.

Where logits are changed, a block is changed after it was loaded; where the logits' own groups are
wanted too, the same block leaves both. Optional are the number of logits that are larger than a
given one, and each group's sum for the entropy.

A step's loads all start before the first of them is used: 64 bytes a thread are in flight.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backends.mosaic_gpu import compat, limits, reading, thread
from pallas_kernels.backends.mosaic_gpu.changes.row_changes import RowChanges, changed, holds_pairs
from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable
from pallas_kernels.backends.mosaic_gpu.reading import (
    RowTargets,
    read_block,
    read_edge_block,
)
from pallas_kernels.backends.mosaic_gpu.schedule import (
    GROUP,
    GROUPS_PER_BLOCK,
    RUN,
    WARPGROUP,
    Index,
    Layout,
    Schedule,
)
from pallas_kernels.backends.mosaic_gpu.thread import Value, Vector, load_at_once, word

_Output = TypeVar("_Output")  # an array; in the kernel its reference
Scales = tuple[jax.Array, ...]  # of exponents: one of each sum
LOG_2 = 0.6931471805599453
# An exponent of 2 whose power is 0 in float32: -inf times 0 would be NaN.
_LEAST = -288.53900817779268
COUNTERS = 2  # of a thread: an addition waits for every other one before
NO_TARGETS = RowTargets(None, None, None)


class GroupOutputs(NamedTuple, Generic[_Output]):
    """The results of pass 1; of a row's `padded_groups` places `num_groups` are written."""

    # [3 * R * programs] f32, [3, R, programs] without its axes: see `_Carry`. Counts are 0 where
    # nothing is counted.
    partials: _Output
    maxima: _Output  # [R * padded_parts] of parts, in the logits' dtype, rounded down to it
    sums: _Output  # [R * padded_groups] f32
    raw_sums: _Output | None = None  # [R * padded_groups] f32: at temperature 1
    exact_maxima: _Output | None = None  # [R * padded_groups] f32, where `maxima` are rounded
    weighted: _Output | None = None  # [R * padded_groups] f32: of s exp(s), for the entropy


class GroupInputs(NamedTuple):
    """Inputs of pass 1 beside the logits: arrays outside the kernel, references inside."""

    targets: RowTargets
    # [R] f32, `inverse_temperature`; None: of the targets' temperatures.
    inverse: Readable | None = None
    # [1] i32, the column of the first group; `offset` + `schedule.vocabulary` columns are there,
    # and 256 and it have no fewer factors of 2 in common than 256 and the row's width. None: 0.
    offset: Readable | None = None
    changes: RowChanges = None  # of the R rows, where they are whole
    # [R] i32, tokens, clipped to the vocabulary here; or [R] f32, logits. Larger ones are counted.
    chosen: Readable | None = None


class _Carry(NamedTuple):
    """A program's values between steps; [groups of a block] float32."""

    maximum: jax.Array
    # Sums of the groups' sums, each as it is: above 0 where a logit is above -inf, NaN where a row
    # has a NaN or +inf. Pass 2 asks for no more.
    evidence: jax.Array
    counts: jax.Array | None  # [threads], if logits are counted


Carries = tuple[_Carry, ...]  # of each of the outputs


def read_groups(
    schedule: Schedule,
    logits: jax.Array,
    inverse: jax.Array,
    raw: bool,
    offset: jax.Array | None = None,
    changes: RowChanges = None,
) -> tuple[GroupOutputs[jax.Array], ...]:
    """The groups of all rows: as they are changed and, with `raw`, as they are.

    Args:
      schedule: its vocabulary is the number of columns that are read.
      logits: [R, columns or more].
      inverse: [R] float32, `inverse_temperature`.
      raw: whether the sums at temperature 1 are wanted too, of the logits as they are. They cost a
        second exponential in rows of other temperatures, and a second store in the others.
      offset: as `GroupInputs` has it.
      changes: of whole rows. None: what is changed is what there is.
    """
    num_targets = logits.shape[0]
    (plain,) = result_types(schedule, num_targets, logits.dtype)
    results = [plain._replace(raw_sums=plain.sums)] if raw else [plain]
    if changes is not None:
        rounds = changes.bias is not None and logits.dtype != jnp.float32
        first = plain._replace(exact_maxima=plain.sums if rounds else None)
        results = [first, *results[: int(raw)]]
    inputs = GroupInputs(NO_TARGETS, inverse, offset, changes)
    return _run(schedule, logits, num_targets, inputs, tuple(results), inclusive=False)


def read_targets(
    schedule: Schedule,
    logits: jax.Array,
    num_targets: int,
    inputs: GroupInputs,
    *,
    weighted: bool,
    inclusive: bool,
) -> GroupOutputs[jax.Array]:
    """The groups of R target rows; those of skipped rows are not initialized.

    Args:
      schedule: its vocabulary is the number of columns that are read.
      logits: [N, columns or more].
      num_targets: R.
      inputs: changes are masks alone.
      weighted: whether the sums for the entropy are wanted.
      inclusive: whether logits that are equal to the given one count too.
    """
    results = result_types(schedule, num_targets, logits.dtype, weighted)
    (out,) = _run(schedule, logits, num_targets, inputs, results, inclusive=inclusive)
    return out


def result_types(
    schedule: Schedule, num_targets: int, dtype: Any, weighted: bool = False
) -> tuple[GroupOutputs[Any]]:
    """The types of what one read of rows leaves."""
    sums = compat.shape((num_targets * schedule.padded_groups,), jnp.float32)
    out = GroupOutputs(
        compat.shape((3 * num_targets * schedule.programs,), jnp.float32),
        compat.shape((num_targets * schedule.padded_parts,), dtype),
        sums,
        weighted=sums if weighted else None,
    )
    return (out,)


def _run(
    schedule: Schedule,
    logits: jax.Array,
    num_targets: int,
    inputs: GroupInputs,
    results: tuple[GroupOutputs[Any], ...],
    *,
    inclusive: bool,
) -> tuple[GroupOutputs[jax.Array], ...]:
    types, tree = jax.tree.flatten(results)
    kernel = GPU.kernel(
        functools.partial(
            read_groups_kernel,
            schedule=schedule,
            shape=logits.shape,
            num_targets=num_targets,
            tree=tree,
            inclusive=inclusive,
        ),
        out_type=types,
        grid=(schedule.programs, num_targets),  # the last axis may exceed 65535, no other may
        grid_names=("program", "row"),
        compiler_params=compat.compiler_params(approx_math=True),
        kernel_name="read_groups",
    )
    return jax.tree.unflatten(tree, kernel(logits.reshape(-1), inputs))  # type: ignore[no-any-return]


class RowOfGroups(NamedTuple):
    """The row that a program reads, in the kernel."""

    schedule: Schedule
    logits_ref: jax.Ref  # [N * width]
    first: Index  # where the row's first group begins
    outputs: tuple[GroupOutputs[jax.Ref], ...]
    scales: Scales  # at the row's temperature and at 1; one where these are the same
    vector: int  # logits that every row's threads can load at once
    changes: RowChanges
    target: Index  # which row
    selected: jax.Array | None  # the logit by which others are counted; None: nothing is counted
    inclusive: bool

    @property
    def in_pairs(self) -> bool:
        """Whether larger logits are counted in pairs of 16 bits, which chips before 9.0 cannot."""
        is_half = self.schedule.vector == 8 and self.vector % 2 == 0
        return is_half and limits.has_clusters()


def read_groups_kernel(
    logits_ref: jax.Ref,  # [N * width]  in
    inputs: GroupInputs,  # in
    *outputs: jax.Ref,  # out, as `tree` of `GroupOutputs`
    schedule: Schedule,
    shape: tuple[int, ...],
    num_targets: int,
    tree: jax.tree_util.PyTreeDef,
    inclusive: bool,
    # What else a program of a row does once it has read, with where the row starts, its target, its
    # number and the scale of exponents.
    then: Callable[[Index, Index, Index, jax.Array], None] | None = None,
) -> None:
    target = lax.axis_index("row")
    program = lax.axis_index("program")
    num_rows, width = shape
    targets = inputs.targets
    # What needs no other number is loaded first, so that it all comes from memory at once.
    logits_row, number = targets.row(target)
    if inputs.inverse is None:
        temperature = targets.temperature(target)
    else:
        inverse = compat.asarray(load_at_once(inputs.inverse, target))
    chosen = None if inputs.chosen is None else load_at_once(inputs.chosen, target)
    first = logits_row * width
    if inputs.offset is not None:
        first = first + inputs.offset[0]

    def read() -> None:
        of_row = reading.inverse_in_kernel(temperature) if inputs.inverse is None else inverse
        row = RowOfGroups(
            schedule,
            logits_ref,
            first,
            jax.tree.unflatten(tree, outputs),
            (reading.exponents_scale(of_row),),
            schedule.common_vector(width),
            inputs.changes,
            target,
            reading.selected_logit(schedule, logits_ref, first, chosen),
            inclusive,
        )
        _read_row(row, program, num_targets, of_row)
        if then is not None:
            then(first, target, program, row.scales[0])

    if targets.row_ids is None and targets.num_rows is None:
        read()
    else:
        pl.when(reading.is_active_target(target, logits_row, number, num_rows))(read)


def _read_row(row: RowOfGroups, program: Index, num_targets: int, inverse: jax.Array) -> None:
    schedule = row.schedule

    def write(carries: Carries) -> None:
        for out, carry in zip(row.outputs, carries, strict=True):
            count = jnp.float32(0)
            if carry.counts is not None:
                count = jnp.sum(carry.counts)
            results = jnp.max(carry.maximum), jnp.sum(carry.evidence), count
            for i, result in enumerate(results):
                place = (i * num_targets + row.target) * schedule.programs + program
                out.partials[place] = result

    def read_with(scales: Scales) -> None:
        scaled = row._replace(scales=scales)
        if schedule.splits:
            pl.when(program < schedule.splits)(lambda: write(read_steps(scaled, program)))
        if schedule.edges:
            pl.when(program == schedule.splits)(lambda: write(read_edges(scaled)))

    if row.outputs[-1].raw_sums is None:
        read_with(row.scales)
        return
    once = jnp.float32(reading.LOG2_E)
    same = inverse == 1
    pl.when(same)(lambda: read_with((once,)))
    pl.when(~same)(lambda: read_with((*row.scales, once)))


def read_steps(row: RowOfGroups, program: Index) -> Carries:
    """The carries after this program's share of the row's whole steps."""
    schedule = row.schedule

    def step(i: jax.Array, carries: Carries) -> Carries:
        start = row.first + i * schedule.block
        return updated(row, i, read_block(row.logits_ref, start, schedule, row.vector), carries)

    begin = program * schedule.num_steps // schedule.splits
    end = (program + 1) * schedule.num_steps // schedule.splits
    return lax.fori_loop(begin, end, step, before_any_block(row))  # type: ignore[no-any-return]


def read_edges(row: RowOfGroups) -> Carries:
    """The carries after the block that is in no step."""
    carries = before_any_block(row)
    for block in row.schedule.edges:
        pieces = read_edge_block(row.logits_ref, row.first, block, row.schedule, row.vector)
        carries = updated(row, block, pieces, carries)
    return carries


def before_any_block(row: RowOfGroups) -> Carries:
    """The carries at a program's start."""
    layout = row.schedule.layout(row.vector).reduce(1)

    def all_groups(value: float) -> jax.Array:
        return compat.cast(jnp.full((GROUPS_PER_BLOCK,), value, jnp.float32), layout)

    count = None if row.selected is None else compat.splat(WARPGROUP, jnp.float32(0))
    return tuple(_Carry(all_groups(-jnp.inf), all_groups(0), count) for _ in row.outputs)


def updated(row: RowOfGroups, block: Index, pieces: list[jax.Array], carries: Carries) -> Carries:
    """The carries after one more block, whose groups are written."""
    schedule, layout, after = row.schedule, row.schedule.layout(row.vector), []
    every = [pieces] * len(carries)
    if row.changes is not None:
        shape = pieces[0].shape
        group = compat.iota(shape, 0, layout) * GROUP + block * schedule.block
        ids = group + compat.iota(shape, 1, layout)
        every[0] = changed(pieces, ids, row.changes, row.target, schedule, layout)
    for out, mine, carry in zip(row.outputs, every, carries, strict=True):
        refs = [out.sums] if out.raw_sums is None else [out.sums, out.raw_sums]
        parts = part_maxima(mine, schedule.parts_per_group)
        largest = functools.reduce(jnp.maximum, parts)
        # With biases all are float32 already, by conversions that both sets share.
        is_biased = row.changes is not None and row.changes.bias is not None
        wide = mine if is_biased else _widened(mine, layout)
        sums, weighted = sums_of(
            wide,
            largest,
            row.scales[: len(refs)],
            layout,
            weighted=out.weighted is not None,
        )
        if out.exact_maxima is not None:
            _store(row, block, out.exact_maxima, [largest])
            parts = [rounded_down(part, pieces[0].dtype) for part in parts]
            largest = functools.reduce(jnp.maximum, parts)
        _store(row, block, out.maxima, parts)
        for i, ref in enumerate(refs):  # of one sum, all of them get it
            _store(row, block, ref, [sums[min(i, len(sums) - 1)]])
        if out.weighted is not None:
            assert weighted is not None
            _store(row, block, out.weighted, [weighted])
        maximum = jnp.maximum(carry.maximum, largest.astype(jnp.float32))
        counts = carry.counts
        if counts is not None:
            counts = _counted(row, mine, counts, layout)
        after.append(_Carry(maximum, carry.evidence + sums[0], counts))
    return tuple(after)


def _counted(
    row: RowOfGroups, pieces: list[jax.Array], counts: jax.Array, layout: Layout
) -> jax.Array:
    """The counts [threads] with those of a block's pieces."""
    assert row.selected is not None
    here, in_pairs = compat.vector_layout(), row.in_pairs

    def body(counts: Vector, selected: Vector, *given: Vector) -> Vector:
        (before,) = thread.words(counts)
        if in_pairs:
            logits = [x for piece in given for x in thread.pairs(piece)]
            kind = thread.dtype_of(given[0])
            number = thread.count_in_pairs(logits, word(selected), kind, row.inclusive)
            return thread.elements_like(counts, [thread.sum_in_pairs([before, number])])
        limit, sums = word(selected), [before, *[word(0.0)] * (COUNTERS - 1)]
        logits = [x for piece in given for x in thread.words(piece)]
        for i, x in enumerate(logits):
            larger = x >= limit if row.inclusive else x > limit
            one = thread.select(larger, 1.0, 0.0)  # of floats, which takes an instruction less
            sums[i % COUNTERS] = thread.sum_in_pairs([sums[i % COUNTERS], one])
        return thread.elements_like(counts, [thread.sum_in_pairs(sums)])

    if in_pairs:
        limit, given = _pair_of_limits(row), pieces
    else:
        limit = thread.again(row.selected)
        given = [piece.astype(jnp.float32) for piece in pieces]
    kind = thread.result((WARPGROUP,), jnp.float32, here)
    layouts: tuple[Layout | str | None, ...] = (here, "scalar", *[layout] * len(given))
    return thread.inline(body, (counts, limit, *given), layouts, kind)


def _pair_of_limits(row: RowOfGroups) -> jax.Array:
    """The given logit twice in a word: of the logits' dtype, or the next one that counts alike."""
    selected, dtype = row.selected, row.logits_ref.dtype
    assert selected is not None
    if selected.dtype == dtype:
        return thread.pair_again(selected)
    layout = compat.warp_layout()
    limits_of_warp = compat.cast(lax.broadcast_in_dim(selected, (thread.WARP,), ()), layout)
    if row.inclusive:
        return thread.pair_of(_rounded_up(limits_of_warp, dtype))
    return thread.pair_of(rounded_down(limits_of_warp, dtype))


def rounded_down(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The largest numbers of a 16-bit dtype that are not above float32 x.

    Pass 2 takes groups by maxima of the logits' dtype. A logit is one: it is at most this.
    """
    nearest = x.astype(dtype)
    bits = lax.bitcast_convert_type(nearest, jnp.int16)
    below = lax.bitcast_convert_type(jnp.where(bits > 0, bits - 1, bits + 1), dtype)
    return jnp.where(nearest.astype(jnp.float32) > x, below, nearest)


def _rounded_up(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The smallest numbers of a 16-bit dtype that are not below float32 x."""
    nearest = x.astype(dtype)
    bits = lax.bitcast_convert_type(nearest, jnp.int16)
    above = lax.bitcast_convert_type(jnp.where(bits < 0, bits - 1, bits + 1), dtype)
    return jnp.where(nearest.astype(jnp.float32) < x, above, nearest)


def part_maxima(pieces: list[jax.Array], parts: int) -> list[jax.Array]:
    """The largest logit [groups] of each of a group's equal parts, in their dtype."""
    each = len(pieces) // parts
    return [
        jnp.max(functools.reduce(jnp.maximum, pieces[i : i + each]), axis=1)
        for i in range(0, len(pieces), each)
    ]


def maxima_of(pieces: list[jax.Array]) -> jax.Array:
    """The largest logit [groups] of each group of a block, in their dtype."""
    (largest,) = part_maxima(pieces, 1)
    return largest


def maxima_and_sums(
    pieces: list[jax.Array], scales: Scales, layout: Layout
) -> tuple[jax.Array, list[jax.Array]]:
    """The largest logit [groups] of each group of a block, in their dtype; a sum by each scale."""
    largest = maxima_of(pieces)
    return largest, sums_of(pieces, largest, scales, layout)[0]


def sums_of(
    pieces: list[jax.Array],
    largest: jax.Array,
    scales: Scales,
    layout: Layout,
    *,
    weighted: bool = False,
) -> tuple[list[jax.Array], jax.Array | None]:
    """A sum [groups] by each scale of groups with these maxima; by the first one for the entropy.

    The latter is of s exp(s), s = (x - maximum) / T.
    """
    reference = finite_reference(largest.astype(jnp.float32))
    reference = compat.cast(lax.broadcast_in_dim(reference, pieces[0].shape, (0,)), layout)
    # The difference is exact near the maximum, however large that is.
    differences = [piece.astype(jnp.float32) - reference for piece in pieces]
    sums, by_exponent = [], None
    for i, scale in enumerate(scales):
        exponents = [x * scale for x in differences]
        terms = [jnp.exp2(x) for x in exponents]
        if weighted and not i:
            by_exponent = _weighted(terms, exponents, layout)
        sums.append(_sum_of_pieces(terms, layout))
    return sums, by_exponent


def _weighted(terms: list[jax.Array], exponents: list[jax.Array], layout: Layout) -> jax.Array:
    """The sums [groups] of terms by their exponents of 2, times log(2)."""
    groups, width = terms[0].shape
    least = [jnp.maximum(x, jnp.float32(_LEAST)) for x in exponents]

    def body(*pieces: Vector) -> Vector:
        pairs = zip(pieces[: len(terms)], pieces[len(terms) :], strict=True)
        first, *others = ([*zip(*map(thread.words, pair), strict=True)] for pair in pairs)
        # Contracted here, and so not by one compiler and not by another one.
        totals = [thread.product(term, exponent) for term, exponent in first]
        for piece in others:
            totals = [
                thread.fused(term, exponent, total)
                for (term, exponent), total in zip(piece, totals, strict=True)
            ]
        total = thread.sum_over_lanes(thread.sum_in_pairs(totals), width // RUN)
        return thread.one_each(total, layout.reduce(1), (groups,))

    kind = thread.result((groups,), jnp.float32, layout.reduce(1))
    arguments = (*terms, *least)
    sums = thread.inline(body, arguments, (layout,) * len(arguments), kind)
    return sums * jnp.float32(LOG_2)  # type: ignore[no-any-return]


def _widened(pieces: list[jax.Array], layout: Layout) -> list[jax.Array]:
    """Pieces as float32; of bfloat16 by fewer instructions, where a thread has pairs of them."""
    if pieces[0].dtype != jnp.bfloat16 or not holds_pairs(pieces, layout):
        return [piece.astype(jnp.float32) for piece in pieces]
    kind = thread.result(pieces[0].shape, jnp.float32, layout)
    return [thread.inline(thread.widened, (piece,), (layout,), kind) for piece in pieces]


def finite_reference(maximum: jax.Array) -> jax.Array:
    """The maximum, or 0 for -inf: any finite reference gives sums of 0, where -inf gives NaN."""
    return jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)


def _sum_of_pieces(terms: list[jax.Array], layout: Layout) -> jax.Array:
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return group_sums_of(terms[0], layout)


def group_sums_of(terms: jax.Array, layout: Layout) -> jax.Array:
    """The sums [groups] of terms [groups, 64]: runs of 8 in pairs, then these in pairs."""
    groups, width = terms.shape

    def body(given: Vector) -> Vector:
        mine = thread.sum_over_lanes(thread.sum_in_pairs(thread.words(given)), width // RUN)
        return thread.one_each(mine, layout.reduce(1), (groups,))

    return thread.inline(
        body, (terms,), (layout,), thread.result((groups,), jnp.float32, layout.reduce(1))
    )


def _store(row: RowOfGroups, block: Index, ref: jax.Ref, values: list[jax.Array]) -> None:
    """Write a block's values, one a group, or one of each of its two parts."""
    size = GROUPS_PER_BLOCK * len(values)
    places = row.schedule.padded_groups * len(values)
    begin = row.target * places + block * size
    if len(values) == 1:
        compat.store_some(ref, begin, size, values[0])
        return

    def body(out: Value, begin: Vector, low: Vector, high: Vector) -> None:
        lanes = WARPGROUP // GROUPS_PER_BLOCK  # of a group: half of them write either part
        me = thread.thread()
        part, group = me & 1, me >> (lanes.bit_length() - 1)
        (low_here,), (high_here,) = thread.values(low), thread.values(high)
        value = thread.select_value(part == 0, low_here, high_here)
        thread.store_value(out, word(begin) + group * 2 + part, value)

    layout = row.schedule.layout(row.vector).reduce(1)
    thread.inline(body, (ref, begin, *values), (None, "scalar", layout, layout), ())
