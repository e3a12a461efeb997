"""What verification and drawing take of a caller, as the arrays that they compute with."""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.contract.arguments import (
    ARRAY,
    ArrayKind,
    AxisSizes,
    array_of,
    check_no_nan,
    check_split,
    check_type,
    fields_of,
    float_array,
    integers,
    known_values,
    numbers_of,
    to_device,
)
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import LOGITS_DTYPES, MAX_EXTRA, check_k
from pallas_kernels.contract.types import AnyArray
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.meshes.placement import AxisName, Split, VocabShard, on_shard
from pallas_kernels.sampling.parameters import Sampling, Truncation, check_values
from pallas_kernels.sampling.types import (
    CompactQ,
    DenseForm,
    DenseQ,
    Drafts,
    RowsRead,
    Rule,
    Verified,
)


def checked_rows(
    logits: AnyArray,
    sampling: Sampling,
    positions: AnyArray,
    name: str = "logits",
    row_ids: AnyArray | None = None,
    axes: str = "[B, S]",
) -> tuple[jax.Array, Sampling, jax.Array, jax.Array | None]:
    """Logits [B, S, V] or flat [N, V], the parameters and positions [B], and the row ids.

    axes: of the row ids.
    """
    logits = logits_of(name, logits, is_flat=row_ids is not None)
    row_ids = None if row_ids is None else row_ids_of_slots(row_ids, axes)
    batch = (logits if row_ids is None else row_ids).shape[0]
    rows = f"{name} {logits.shape}" if row_ids is None else f"row_ids {row_ids.shape}"
    sampling = sampling_of(sampling, batch, rows)
    positions = integers("positions", positions, jnp.int32)
    check_slots("positions", positions, batch, rows)
    return logits, sampling, positions, row_ids


def row_ids_of_slots(row_ids: AnyArray, axes: str = "[B, S]") -> jax.Array:
    """The row ids with these axes."""
    row_ids = integers("row_ids", row_ids, jnp.int32)
    if row_ids.ndim != axes.count(",") + 1 or 0 in row_ids.shape:
        raise ValueError(f"row_ids {row_ids.shape}: give the rows of each slot, {axes}")
    return row_ids


def sampling_of(sampling: Sampling, batch: int, rows: str) -> Sampling:
    """The parameters [B] of `batch` slots; rows: what they go with, in words."""
    what = "a `Sampling`, as `Sampling.of(B, temperature=...)` makes it"
    check_type("sampling", sampling, Sampling, what)
    sampling = Sampling(
        temperature=float_array("sampling.temperature", sampling.temperature).astype(jnp.float32),
        top_k=integers("sampling.top_k", sampling.top_k, jnp.int32),
        top_p=float_array("sampling.top_p", sampling.top_p).astype(jnp.float32),
        min_p=float_array("sampling.min_p", sampling.min_p).astype(jnp.float32),
        seed=integers("sampling.seed", sampling.seed, jnp.uint32),
    )
    for field, value in sampling._asdict().items():
        check_slots(f"sampling.{field}", value, batch, rows)
    check_values(sampling, "sampling.")
    return sampling


def check_slots(name: str, values: jax.Array, batch: int, rows: str) -> None:
    """Refuse what is not [B]."""
    if values.shape != (batch,):
        raise ValueError(
            f"{name} {values.shape} does not go with {rows}: give one value a slot, "
            f"[B] = {(batch,)}"
        )


def split_of(mesh: Mesh | None, axis_name: AxisName | None, vocab_size: int | None) -> Split:
    """What a caller says of how logits are split, if it can be so."""
    check_split(mesh, axis_name, vocab_size)
    if axis_name and mesh is None:
        on_shard(axis_name, 2**31 - 1, None)  # there is such an axis around this call
    return Split(mesh, axis_name, vocab_size)


def k_of(k: int | None, vocab_size: int) -> int | None:
    """The static number of top columns, if it is one."""
    return None if k is None else check_k(k, vocab_size)


def drafts_of(drafts: Drafts) -> Drafts:
    """`Drafts` of int32 ids and numbers, with a q of their shape."""
    what = "`Drafts(token_ids, num)`, ids [B, D] and how many of them each slot has [B]"
    check_type("drafts", drafts, Drafts, what)
    token_ids = integers("drafts.token_ids", drafts.token_ids, jnp.int32)
    num = integers("drafts.num", drafts.num, jnp.int32)
    if token_ids.ndim != 2 or num.shape != token_ids.shape[:1]:
        raise ValueError(
            f"drafts.num {num.shape} does not go with drafts.token_ids {token_ids.shape}: give ids "
            "[B, D], and one number a slot [B]"
        )
    most, numbers = token_ids.shape[1], known_values(num)
    if numbers is not None and numbers.size and not 0 <= numbers.min() <= numbers.max() <= most:
        raise ValueError(
            f"drafts.num has {numbers.max() if numbers.max() > most else numbers.min()}: each slot "
            f"has 0 to D = {most} drafts, as many as drafts.token_ids {token_ids.shape} has columns"
        )
    q = drafts.q
    if q is not None:
        what = "`CompactQ(ids, logprobs)`, each [B, D, M], or `DenseQ(logprobs)`, [B, D, V]"
        check_type("drafts.q", q, (CompactQ, DenseQ), what)
        q = _compact(q, token_ids) if isinstance(q, CompactQ) else _dense(q, token_ids)
    return drafts._replace(token_ids=token_ids, num=num, q=q)


def _compact(q: CompactQ, token_ids: jax.Array) -> CompactQ:
    ids = integers("drafts.q.ids", q.ids, jnp.int32)
    logprobs = float_array("drafts.q.logprobs", q.logprobs).astype(jnp.float32)
    if ids.shape != logprobs.shape or ids.ndim != 3 or ids.shape[:2] != token_ids.shape:
        raise ValueError(
            f"drafts.q has ids {ids.shape} and logprobs {logprobs.shape}, and "
            f"drafts.token_ids are {token_ids.shape}: give both as [B, D, M]"
        )
    return CompactQ(ids, logprobs)


def _dense(q: DenseQ, token_ids: jax.Array) -> DenseQ:
    if q.form not in get_args(DenseForm):
        raise ValueError(
            f"drafts.q.form = {q.form!r} is not known: choose one of "
            f"{', '.join(map(repr, get_args(DenseForm)))}, as `DenseQ.of_probs` and "
            "`DenseQ.of_logits` do"
        )
    values, batch = float_array("drafts.q.values", q.values), token_ids.shape[0]
    if values.dtype.name not in LOGITS_DTYPES:
        raise TypeError(
            f"drafts.q.values is of {values.dtype}: give {', '.join(LOGITS_DTYPES)}, by "
            "`.astype('float32')` for example"
        )
    row_ids = q.row_ids
    if row_ids is None:
        if values.ndim != 3 or values.shape[:2] != token_ids.shape:
            raise ValueError(
                f"drafts.q.values {values.shape} does not go with drafts.token_ids "
                f"{token_ids.shape}: give [B, D, V], or flat rows [Q, V] with row_ids [B, D]"
            )
    else:
        row_ids = integers("drafts.q.row_ids", row_ids, jnp.int32)
        if values.ndim != 2 or row_ids.shape != token_ids.shape or 0 in values.shape:
            raise ValueError(
                f"drafts.q.values {values.shape} and row_ids {row_ids.shape} do not go with "
                f"drafts.token_ids {token_ids.shape}: give flat rows [Q, V], Q of 1 and more, and "
                "the row of each draft [B, D]"
            )
    temperature = q.temperature
    if q.form == "logits":
        if temperature is None:
            raise TypeError(
                "drafts.q.temperature is None: logits need the temperature of the draws, as "
                "`DenseQ.of_logits(logits, temperature)` takes it"
            )
        name = "drafts.q.temperature"
        temperature = numbers_of(name, temperature, jnp.float32)
        if temperature.shape not in ((), (batch,)):
            raise ValueError(
                f"{name} {temperature.shape}: give one number, or one a slot, [B] = {(batch,)}"
            )
        temperature = jnp.broadcast_to(temperature, (batch,))
        check_no_nan(name, temperature)
    elif temperature is not None:
        raise ValueError(
            f"drafts.q.temperature goes with logits, and these are {q.form}: give it to "
            "`DenseQ.of_logits`, or divide before the softmax"
        )
    return DenseQ(values, row_ids, temperature, q.form)


def check_columns(q: DenseQ, logits: jax.Array) -> None:
    """Refuse a q over another number of columns than the logits have."""
    if q.values.shape[-1] != logits.shape[-1]:
        raise ValueError(
            f"drafts.q.values {q.values.shape} has {q.values.shape[-1]} columns and the logits "
            f"{logits.shape} have {logits.shape[-1]}: give both over the same vocabulary, columns "
            "without a token as no probability (logprobs -inf)"
        )


def check_rule(rule: str, drafts: Drafts, accept: object) -> None:
    """Refuse a rule that is not known, or has nothing to decide about."""
    if rule not in get_args(Rule):
        raise ValueError(
            f"rule = {rule!r} is not known: choose one of {', '.join(map(repr, get_args(Rule)))}"
        )
    if rule == "token":
        return
    if accept is not None:
        raise ValueError(f"rule = {rule!r} and accept: give one of them")
    if drafts.q is None:
        raise ValueError(
            f"rule = {rule!r} is for drafts with a q, and these are certain: their rule accepts "
            "as many already"
        )


def check_q(
    drafts: Drafts,
    sampling: Sampling,
    row_ids: jax.Array | None,
    logits: tuple[int, ...],
    vocab_size: int | None,
) -> None:
    """Refuse a q that is no distribution, where its values are known.

    Of drafts that there are, of slots that sample: the others' q are not looked at.

    logits: their shape.
    """
    q, token_ids = drafts.q, drafts.token_ids
    if isinstance(q, DenseQ):
        _check_rows_of_q(q, drafts)
    if q is None or (isinstance(q, DenseQ) and q.form == "logits"):
        return
    of_slots = [known_values(x) for x in (drafts.num, token_ids, sampling.temperature)]
    rows = None if row_ids is None else known_values(row_ids)
    sums = _known_sums(q, token_ids.shape, vocab_size)
    if sums is None or any(x is None for x in of_slots) or (row_ids is not None and rows is None):
        return
    num, ids, temperature = of_slots
    assert num is not None
    assert ids is not None
    assert temperature is not None
    there = np.arange(ids.shape[1])[None] < num[:, None]
    there &= (ids >= 0) & (ids < (vocab_size or logits[-1])) & (temperature > 0)[:, None]
    if rows is not None:
        there &= (rows[:, :-1] >= 0) & (rows[:, :-1] < logits[0])
    is_exact = sums.dtype == "float32"
    wrong = there & ~(np.abs(sums.sums - 1) <= (1e-3 if is_exact else 5e-2))
    if not wrong.any():
        return
    slot, draft = (int(x[0]) for x in np.nonzero(wrong))
    raise ValueError(
        f"{sums.name} of slot {slot}, draft {draft} are no {sums.form} of a distribution: the "
        f"probabilities sum to {sums.sums[slot, draft]:.4g} (1 within {1e-3 if is_exact else 5e-2} "
        f"is needed), and the values lie in {sums.least[slot, draft]:.4g} .. "
        f"{sums.largest[slot, draft]:.4g}. Give {sums.ways}: of what the draft was drawn from"
    )


def _check_rows_of_q(q: DenseQ, drafts: Drafts) -> None:
    """Refuse a draft's row of q that is not there, where both are known."""
    if q.row_ids is None:
        return
    rows, num = known_values(q.row_ids), known_values(drafts.num)
    if rows is None or num is None:
        return
    num_rows = q.values.shape[0]
    wrong = (np.arange(rows.shape[1])[None] < num[:, None]) & ((rows < 0) | (rows >= num_rows))
    if wrong.any():
        slot, draft = (int(x[0]) for x in np.nonzero(wrong))
        raise ValueError(
            f"drafts.q.row_ids of slot {slot}, draft {draft} is {rows[slot, draft]}: "
            f"drafts.q.values {q.values.shape} has the rows 0 .. {num_rows - 1}; name the row "
            "that each draft was drawn from"
        )


class _Sums(NamedTuple):
    """What the q of each draft [B, D] sum to, and how to speak of it."""

    name: str
    form: str
    ways: str
    dtype: str
    sums: np.ndarray
    least: np.ndarray
    largest: np.ndarray


def _known_sums(
    q: CompactQ | DenseQ, shape: tuple[int, ...], vocab_size: int | None
) -> _Sums | None:
    """The sums, where the values are known."""
    if isinstance(q, CompactQ):
        logprobs, ids = known_values(q.logprobs), known_values(q.ids)
        if logprobs is None or ids is None:
            return None
        logprobs = np.where(ids >= 0, logprobs, -np.inf)
        with np.errstate(over="ignore"):
            sums = np.exp(logprobs).sum(axis=2)
        largest = logprobs.max(axis=2, initial=-np.inf)
        least = np.where(logprobs > -np.inf, logprobs, np.inf).min(axis=2, initial=np.inf)
        ways = "logprobs, jnp.log(probs) of probabilities"
        return _Sums("drafts.q.logprobs", "logprobs", ways, "float32", sums, least, largest)
    values, rows = q.values, q.row_ids
    if isinstance(values, jax.core.Tracer) or not values.is_fully_addressable:
        return None
    place = np.arange(shape[0] * shape[1]).reshape(shape)
    if rows is not None:
        known_rows = known_values(rows)
        if known_rows is None:
            return None
        place = np.clip(known_rows, 0, values.shape[0] - 1)
    with jax.ensure_compile_time_eval():  # a known q may stand in a program that is traced
        sums_and_range = compiled(_sums_and_range, q.form, vocab_size)(values)
    sums, least, largest = (np.asarray(x).reshape(-1)[place] for x in sums_and_range)
    ways = "probabilities to `DenseQ.of_probs`, logprobs to `DenseQ`, logits to `DenseQ.of_logits`"
    return _Sums("drafts.q.values", q.form, ways, values.dtype.name, sums, least, largest)


def _sums_and_range(
    form: str, vocab_size: int | None, values: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sums of the rows' probabilities, their least values and their largest."""
    x = values[..., :vocab_size].astype(jnp.float32)
    probs = x if form == "probs" else jnp.exp(x)
    least = jnp.where(x > -jnp.inf, x, jnp.inf).min(axis=-1)
    return probs.sum(axis=-1, dtype=jnp.float32), least, x.max(axis=-1)


def logits_of(name: str, values: AnyArray, is_flat: bool) -> jax.Array:
    """Logits as an array, if their shape and dtype are supported, and they have a number."""
    check_type(name, values, (np.ndarray, jax.Array), ARRAY)
    if is_flat and values.ndim != 2:
        raise ValueError(f"{name} {values.shape}: give [N, V] with row_ids, or [B, S, V] without")
    if not is_flat and values.ndim != 3:
        raise ValueError(
            f"{name} {values.shape}: give [B, S, V]; one row a slot is x[:, None], and flat rows "
            "[N, V] need row_ids"
        )
    if values.dtype.name not in LOGITS_DTYPES:
        raise TypeError(
            f"{name} is of {values.dtype}: give {', '.join(LOGITS_DTYPES)}, by "
            "`.astype('float32')` for example"
        )
    if 0 in values.shape:
        raise ValueError(f"{name} {values.shape} has no number: give 1 and more of each axis")
    return jnp.asarray(values)


def check_verified(verified: Verified) -> None:
    """Refuse what `verify` did not return, or returned without `k`."""
    check_type("verified", verified, Verified, "what `verify(logits, ..., k=...)` returned")
    if verified.read is None:
        raise ValueError(
            "verified has no read: give `verify` k, the number of top columns (0 and more), or "
            "take `pallas_kernels.topk_logprobs` of the emitted tokens, which reads their rows"
        )
    rows = read_of(verified.read).largest.shape
    if verified.row_ids is not None:
        row_ids = array_of("verified.row_ids", verified.row_ids, "integers", ("B", "S"), "[B, S]")
        rows = row_ids.shape
    array_of("verified.token_ids", verified.token_ids, "integers", rows, "one a position [B, S]")


def checked_changes(
    allowed: object, bias_token_ids: object, bias: object, rows: tuple[int, ...]
) -> Changes:
    """Changes of rows [B, S] or [N]: arrays of these; what they hold is checked by the read."""
    axes = "[B, S, ...]" if len(rows) == 2 else "[N, ...]"
    return Changes(
        None if allowed is None else array_of("allowed", allowed, "integers", (*rows, "W"), axes),
        None
        if bias_token_ids is None
        else array_of("bias_token_ids", bias_token_ids, "integers", (*rows, "I"), axes),
        None if bias is None else array_of("bias", bias, "floats", (*rows, "I"), axes),
    )


def check_accept(accept: object) -> None:
    """Refuse a rule that can't be called."""
    if accept is not None and not callable(accept):
        raise TypeError(f"accept is {accept!r}: give a function of u, p and q, or None")


def check_shard(shard: object) -> None:
    """Refuse what says nothing of a vocabulary's columns."""
    check_type("shard", shard, VocabShard, "a `pallas_kernels.VocabShard`")


def cut_of(cut: Truncation, rows: tuple[int, ...]) -> Truncation:
    """The truncations of these rows."""
    what = "a `Truncation`, as `verify` and `truncation` make it"
    axes = "one a row"
    return fields_of(
        "cut", cut, Truncation, what,
        {"cut_logit": ("floats", rows, axes), "cut_id": ("integers", rows, axes),
         "log_kept": ("floats", rows, axes)},
    )  # fmt: skip


def read_of(read: RowsRead) -> RowsRead:
    """What `verify` has read of rows."""
    check_type("read", read, RowsRead, "`Verified.read` of a `verify` with k")
    check_type("read.largest", read.largest, (np.ndarray, jax.Array), ARRAY)
    rows: AxisSizes = read.largest.shape
    row, table = (rows, "one a row"), "some of each row"
    kinds: dict[str, tuple[ArrayKind, AxisSizes, str]] = dict.fromkeys(
        ("largest", "log_sum", "log_scaled", "temperature"), ("floats", *row)
    )
    kinds["top_ids"] = "integers", (*rows, "K"), table
    kinds["top_logits"] = "floats", (*rows, "K"), table
    kinds["maxima"] = "floats", (*rows, "G"), table
    return fields_of("read", read, RowsRead, "`Verified.read`", kinds)


def ids_of(name: str, ids: AnyArray, shape: tuple[int, ...]) -> jax.Array:
    """Token ids by slot and position."""
    ids = integers(name, ids, jnp.int32)
    if ids.shape != shape:
        raise ValueError(f"{name} {ids.shape}: give one a slot and position, [B, S] = {shape}")
    return ids


def flags_of(name: str, flags: AnyArray, batch: int) -> jax.Array:
    """A bool of each slot."""
    check_type(name, flags, (np.ndarray, jax.Array), ARRAY)
    if flags.dtype != bool:
        raise TypeError(f"{name} is of {flags.dtype}: give an array of bools")
    if flags.shape != (batch,):
        raise ValueError(f"{name} {flags.shape}: give one bool a slot, [B] = {(batch,)}")
    return to_device(flags, jnp.bool_)


def extra_ids_of(ids: AnyArray, batch: int) -> jax.Array:
    """More token ids [B, C] of each slot, C up to `MAX_EXTRA`."""
    ids = integers("extra_token_ids", ids, jnp.int32)
    if ids.ndim != 2 or ids.shape[0] != batch or ids.shape[1] > MAX_EXTRA:
        raise ValueError(
            f"extra_token_ids {ids.shape}: give C ids a slot, [B, C] with B = {batch} and C up to "
            f"{MAX_EXTRA}"
        )
    return ids
