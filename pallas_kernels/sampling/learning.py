"""The learner's side of kept sets: a token's logprob over the tokens that it was drawn among.

The rollout truncated its distribution (top-k, top-p, min-p); a learner that normalizes over the
whole vocabulary scores another policy, and one that truncates by its own logits may cut elsewhere.
With the recorded set both describe one policy, and the ratio of equal weights is 1.
`kept_logprobs` takes logits, `learner_logprobs` hidden states and a head.

Axes: `*rows` of any number (often batch and position), H hidden size, V vocabulary, M ids of a set.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.backends import exact_sums, row_totals
from pallas_kernels.contract.arguments import array_of, known_values, numbers_of
from pallas_kernels.contract.rows import check_floats, check_matrix
from pallas_kernels.linear.call import (
    check_tile,
    linear_kept_logprobs,
    linear_topk_logprobs,
)
from pallas_kernels.linear.types import LogprobScale, loaded, stored
from pallas_kernels.lowering.forms import barrier
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.logarithm import log_of_total, logarithm
from pallas_kernels.numbers.quotient import quotient
from pallas_kernels.sampling import row_read
from pallas_kernels.sampling.kept_set import PaddedKept
from pallas_kernels.sampling.learner_arguments import check_rollout_rows, flagged, sets_of
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.rows import GroupedRows
from pallas_kernels.topk.call import topk_logprobs

_AnyArray = jax.Array | np.ndarray


def kept_logprobs(
    logits: Float[_AnyArray, "*rows V"],
    token_ids: Int32[_AnyArray, "*rows"],
    kept: tuple[_AnyArray, _AnyArray, _AnyArray],
    temperatures: Float[_AnyArray, "..."] | float = 1.0,
    *,
    row_digests: _AnyArray | None = None,
) -> Float32[Array, "*rows"]:
    """Logprobs of tokens under log_softmax(logits / T), renormalized over their kept sets.

    By the count of a row's set:

    - ids: over these alone. A token that is not among them has -inf, and no gradient. The only
      token of a set (a greedy request's) has 0.
    - `KEPT_ALL`: over the whole vocabulary.
    - `KEPT_MANY`: over the whole vocabulary, less the recorded log of the kept share, which is
      taken for a constant.
    - 0, no token is here (a prompt, padding): 0, without a gradient.

    Differentiable in reverse by logits and temperatures. The forward pass looks at M logits a row,
    and reads whole rows only in a batch where some row has a mark. Its temporaries are
    proportional to rows times M; in the backward pass the gradient itself is `[*rows, V]`.

    Args:
      logits: bfloat16, float16 or float32; computed in float32.
      token_ids: the tokens that were emitted. One outside the vocabulary gives NaN.
      kept: `KeptSets.padded(...)`, such as of `TokenColumns.kept`: a tuple of ids `[*rows, M]`,
        counts and log_kept `[*rows]`, as NumPy or JAX arrays.
      temperatures: of the requests, `[*rows]` or what broadcasts to it; 0 (greedy) counts as 1.
      row_digests: the rollout's, `[*rows]` uint64 or `[*rows, 2]` uint32, 0 where there is none:
        all logits are read, and a row with others than the rollout's is refused. Under `jax.jit`,
        and where a gradient is taken, its logprob is NaN instead.

    Raises:
      TypeError, ValueError: the kept sets are not of these rows or cannot be (`check_kept`); the
        digests are of other logits, or of another dtype.
    """
    logits = check_floats("logits", logits)
    rows = logits.shape[:-1]
    token_ids = array_of("token_ids", token_ids, "integers", rows, "one a row of the logits")
    sets = sets_of(kept, rows, logits.shape[-1])
    t, same = _temperatures(temperatures, rows), check_rollout_rows(logits, row_digests)
    return flagged(compiled(_of_any_temperature)(logits, token_ids, sets, t), same)


def _of_any_temperature(
    logits: jax.Array, token_ids: jax.Array, kept: PaddedKept, t: jax.Array
) -> jax.Array:
    """`kept_logprobs` of arrays."""
    return _logprobs(logits, token_ids, kept, _usable(t))


def _temperatures(temperatures: ArrayLike, rows: tuple[int, ...]) -> jax.Array:
    """The temperatures of these rows."""
    t = numbers_of("temperatures", temperatures, jnp.float32)
    values = known_values(temperatures if isinstance(temperatures, np.ndarray) else t)
    if values is not None and not (values >= 0).all():
        raise ValueError(
            f"temperatures has {values[~(values >= 0)].flat[0]:g}: give those of the requests, 0 "
            "for a greedy one"
        )
    try:
        return jnp.broadcast_to(t, rows)
    except ValueError:
        raise ValueError(f"temperatures {t.shape}: give one number, or one a row, {rows}") from None


def _usable(t: jax.Array) -> jax.Array:
    """Temperatures to divide by: those of greedy requests count as 1, and NaN is what is none."""
    return jnp.where(t > 0, t, jnp.where(t == 0, jnp.float32(1), jnp.nan))


@jax.custom_vjp
def _logprobs(
    logits: jax.Array, token_ids: jax.Array, kept: PaddedKept, temperatures: jax.Array
) -> jax.Array:
    """`kept_logprobs` of temperatures above 0."""
    return _forward(logits, token_ids, kept, temperatures)[0]


_Residuals = tuple[jax.Array, jax.Array, PaddedKept, jax.Array, LogprobScale, jax.Array]


def _forward(
    logits: jax.Array, token_ids: jax.Array, kept: PaddedKept, temperatures: jax.Array
) -> tuple[jax.Array, _Residuals]:
    vocab_size = logits.shape[-1]
    token_logits = _at(logits, token_ids[..., None])[..., 0]
    token_logits = jnp.where((token_ids >= 0) & (token_ids < vocab_size), token_logits, jnp.nan)
    inside = (is_id(kept) & (kept.token_ids == token_ids[..., None])).any(-1)
    over_all = kept.counts < 0
    of_set = _scale_of_set(_of_set(logits, kept), temperatures, vocab_size)
    # Whole rows are read only where some row needs it.
    of_rows = lax.cond(
        jnp.any(over_all), lambda: _scale_of_rows(logits, temperatures), lambda: of_set
    )
    scale: LogprobScale = jax.tree.map(lambda x, y: jnp.where(over_all, x, y), of_rows, of_set)
    log_mass = scale.log_sum + jnp.where(over_all, kept.log_kept, 0)
    logprobs = jnp.where(
        token_logits == -jnp.inf,
        jnp.where(jnp.isnan(log_mass), jnp.nan, -jnp.inf),
        _relative_of_token(token_logits, scale, temperatures) - log_mass,
    )
    logprobs = jnp.where(over_all | inside | jnp.isnan(token_logits), logprobs, -jnp.inf)
    logprobs = jnp.where(kept.counts == 0, 0.0, logprobs)
    return logprobs, (logits, token_ids, kept, temperatures, scale, logprobs)


def _backward(residuals: _Residuals, gradient: jax.Array) -> tuple[Any, ...]:
    logits, token_ids, kept, temperatures, scale, logprobs = residuals
    over_all = kept.counts < 0
    has_slope = (kept.counts != 0) & (logprobs != -jnp.inf)
    slope = jnp.where(has_slope, gradient, 0.0) / temperatures
    vocab_size = logits.shape[-1]

    # XLA scatters no 16-bit floats on a CPU without widening all of them: it gets integers.
    def as_bits(values: jax.Array) -> jax.Array:
        return stored(values.astype(logits.dtype))

    relative = _relative(_of_set(logits, kept), scale, temperatures)
    shares = jnp.exp(relative - scale.log_sum[..., None])
    is_token = is_id(kept) & (kept.token_ids == token_ids[..., None])
    of_set = jnp.where(is_id(kept), slope[..., None] * (is_token.astype(jnp.float32) - shares), 0.0)
    mean = _mean(shares, relative)

    def of_rows() -> tuple[jax.Array, jax.Array]:
        def shares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            relative = _relative(x, scale, temperatures)
            share = jnp.exp(relative - scale.log_sum[..., None])
            return jnp.where(over_all[..., None], share, 0.0), relative

        ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        is_token = over_all[..., None] & (ids == token_ids[..., None])
        token_slope = slope[..., None] * (is_token.astype(jnp.float32) - shares(logits)[0])
        # Shares of their own: what the mean and the gradient share, XLA would write down.
        return as_bits(token_slope), _mean(*shares(barrier(logits)))

    def no_rows() -> tuple[jax.Array, jax.Array]:
        return as_bits(jnp.zeros(logits.shape, jnp.float32)), jnp.zeros_like(mean)

    by_logits, whole_mean = lax.cond(jnp.any(over_all), of_rows, no_rows)
    # A row has ids or a mark, and the ids differ: nothing has to be added up.
    flat = by_logits.reshape(-1, vocab_size)
    width = kept.token_ids.shape[-1]
    row = jnp.arange(flat.shape[0], dtype=jnp.int32)[:, None]
    ids = jnp.where(is_id(kept), kept.token_ids, vocab_size).reshape(-1, width)
    flat = flat.at[row, ids].set(as_bits(of_set).reshape(-1, width), mode="drop")
    gradient = loaded(flat, logits.dtype).reshape(logits.shape)
    token_logits = _relative(_at(logits, token_ids[..., None])[..., 0], scale, temperatures)
    by_temperature = slope * (jnp.where(over_all, whole_mean, mean) - token_logits)
    by_temperature = jnp.where(has_slope, by_temperature, 0.0)
    return gradient, None, None, by_temperature


_logprobs.defvjp(_forward, _backward)


def is_id(kept: PaddedKept) -> Bool[Array, "*rows M"]:
    """Which entries of the sets are ids."""
    shape = kept.token_ids.shape
    column = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    return column < kept.counts[..., None]


def _of_set(logits: jax.Array, kept: PaddedKept) -> Float32[Array, "*rows M"]:
    """The sets' logits; -inf where there is no id."""
    return jnp.where(is_id(kept), _at(logits, jnp.asarray(kept.token_ids)), -jnp.inf)


def _at(logits: jax.Array, ids: jax.Array) -> Float32[Array, "*rows M"]:
    """The logits of ids [*rows, M]; any logit for an id outside the vocabulary."""
    ids = jnp.clip(ids, 0, logits.shape[-1] - 1)
    return jnp.take_along_axis(logits, ids, axis=-1).astype(jnp.float32)


def _scale_of_set(
    x: Float32[Array, "*rows M"], temperatures: jax.Array, vocab_size: int
) -> LogprobScale:
    """The largest logit of each set and the logarithm of its sum, which no other row changes."""
    largest = x.max(-1)
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    inverse = row_totals.inverse_of(temperatures.reshape(-1), temperatures.size)
    gap = row_totals.scaled(x.reshape(-1, x.shape[-1]), largest.reshape(-1, 1), inverse[:, None])
    sums = exact_sums.mass(exponential(gap), vocab_size)
    total = exact_sums.to_float(sums, vocab_size).reshape(largest.shape)
    log_sum = jnp.where(total == 0, 0.0, log_of_total(total))
    # A NaN has no digits, and +inf no sum.
    return LogprobScale(largest, jnp.where(jnp.isfinite(largest), log_sum, jnp.nan))


def _scale_of_rows(logits: Float[Array, "*rows V"], temperatures: jax.Array) -> LogprobScale:
    """The same of all logits of each row, with the bits of `topk_logprobs`."""
    rows = logits.shape[:-1]
    flat, t = logits.reshape(-1, logits.shape[-1]), temperatures.reshape(-1)
    any_ids = jnp.zeros(t.shape, jnp.int32)
    results = topk_logprobs(flat, any_ids, 1, temperatures=t, top_logits=True)
    assert results.top_logits is not None
    # The logprob of the largest logit is minus the logarithm of the sum.
    scale = results.top_logits[:, 0], -results.logprobs[:, 1]
    return LogprobScale(*(x.reshape(rows) for x in scale))


def _relative(x: jax.Array, scale: LogprobScale, temperatures: jax.Array) -> jax.Array:
    """(x - m) / T of x [*rows] or [*rows, N]: a quotient x / T would have lost the digits."""
    shape = (*temperatures.shape, *(1,) * (x.ndim - temperatures.ndim))
    above = x.astype(jnp.float32) - scale.maximum.reshape(shape)
    return above / temperatures.reshape(shape)


def _relative_of_token(
    x: Float32[Array, "*rows"], scale: LogprobScale, temperatures: jax.Array
) -> Float32[Array, "*rows"]:
    """`_relative` of one logit a row, with the bits of `topk_logprobs`."""
    return quotient(x - scale.maximum, barrier(temperatures))


def _mean(shares: Float32[Array, "*rows N"], z: Float32[Array, "*rows N"]) -> jax.Array:
    """The mean of z under the shares; -inf has share 0 and counts nothing."""
    return jnp.where(shares > 0, shares * z, 0.0).sum(-1)


def rollout_logprobs(
    logits: Float[_AnyArray, "N V"],
    token_ids: Int32[_AnyArray, " N"],
    kept: tuple[_AnyArray, _AnyArray, _AnyArray] | None = None,
    temperatures: Float[_AnyArray, " N"] | None = None,
    *,
    row_digests: _AnyArray | None = None,
) -> Float32[Array, " N"]:
    """The logprobs that a rollout has of these logits, bit for bit.

    Raw, or scaled with temperatures: those of `topk_logprobs`. With kept sets they are of the
    processed distribution, by the sums that `verify` cuts with; elsewhere as `kept_logprobs`.

    Differentiable by logits and temperatures: without kept sets as `topk_logprobs`, with them in
    reverse, by the gradient of `kept_logprobs`.

    Args:
      logits: bfloat16, float16 or float32; computed in float32.
      token_ids: the tokens that were emitted.
      kept: as `kept_logprobs` has them.
      temperatures: of the requests; without them 1. With kept sets, a greedy request's only token
        (temperature 0) has logprob 0 and no gradient.
      row_digests: as `kept_logprobs` has them: rows of other logits than the rollout's are refused.

    Raises:
      TypeError, ValueError: as `kept_logprobs`, or as `topk_logprobs`.
    """
    logits = check_matrix("logits", logits, "[N, V]")
    same = check_rollout_rows(logits, row_digests)
    scaled = topk_logprobs(logits, token_ids, 0, temperatures=temperatures).logprobs[:, 0]
    if kept is None:
        return flagged(scaled, same)
    token_ids = jnp.asarray(token_ids, jnp.int32)
    sets = sets_of(kept, token_ids.shape, logits.shape[1])
    t = _temperatures(1.0 if temperatures is None else temperatures, token_ids.shape)
    arrays = logits, token_ids, sets, t, lax.stop_gradient(scaled)
    return flagged(compiled(_processed)(*arrays), same)


@jax.custom_vjp
def _processed(
    logits: jax.Array, token_ids: jax.Array, sets: PaddedKept, t: jax.Array, scaled: jax.Array
) -> jax.Array:
    """`rollout_logprobs` with kept sets; `scaled` are those of all tokens of each row."""
    number, vocab_size = logits.shape
    read = row_read.read_sampled_rows(GroupedRows.of(logits), Sampling.of(number, temperature=t))
    x = _of_set(logits, sets)
    gap = row_totals.scaled(x, read.largest[:, None], read.inverse[:, None])
    of_set = exact_sums.mass(exponential(gap), vocab_size)
    share, row_mass = (exact_sums.to_float(x, vocab_size) for x in (of_set, read.total))
    over_all = sets.counts < 0
    log_kept = jnp.where(over_all, sets.log_kept, jnp.minimum(logarithm(share / row_mass), 0.0))
    processed = jnp.where(t > 0, jnp.minimum(scaled - log_kept, 0.0), 0.0)
    inside = over_all | (is_id(sets) & (sets.token_ids == token_ids[:, None])).any(-1)
    processed = jnp.where(inside, processed, -jnp.inf)
    return jnp.where(sets.counts == 0, 0.0, jnp.where(jnp.isnan(scaled), scaled, processed))


def _processed_forward(*arrays: Any) -> tuple[jax.Array, Any]:
    return _processed(*arrays), arrays[:4]


def _processed_backward(arrays: Any, gradient: jax.Array) -> tuple[Any, ...]:
    """Of `kept_logprobs`: rounding is all that differs."""
    logits, token_ids, sets, t = arrays
    has_slope, usable = t > 0, _usable(t)
    _, back = jax.vjp(lambda x, t: _logprobs(x, token_ids, sets, t), logits, usable)
    by_logits, by_temperature = back(jnp.where(has_slope, gradient, 0))
    return by_logits, None, None, by_temperature, None


_processed.defvjp(_processed_forward, _processed_backward)


def learner_logprobs(
    hidden: Float[_AnyArray, "*rows H"],
    head: Float[_AnyArray, "V H"],
    token_ids: Int32[_AnyArray, "*rows"],
    kept: tuple[_AnyArray, _AnyArray, _AnyArray],
    temperatures: Float[_AnyArray, "..."] | float = 1.0,
    *,
    logits_dtype: str = "float32",
    soft_cap: float | None = None,
    row_tile: int | None = None,
) -> Float32[Array, "*rows"]:
    """The `kept_logprobs` of logits that are never all there.

    Of the head, a row with ids reads its own tokens' rows alone. Rows with a mark (`KEPT_ALL`,
    `KEPT_MANY`) take the whole head, a block at a time, and only in a batch that has one.
    Differentiable in reverse by hidden, head and temperatures; nothing of `[*rows, V]` exists then
    either. The logits are those of `pallas_kernels.linear_topk_logprobs`. It takes no digests: it
    reads the whole head only where it must, and they are of all logits.

    Args:
      hidden: bfloat16, float16 or float32.
      head: of the same dtype, a row a token.
      token_ids, kept, temperatures: as `kept_logprobs` has them; M is up to 4096.
      logits_dtype: what the product is rounded to, as the rollout's model does it.
      soft_cap: cap * tanh(x / cap) of the logits, or None.
      row_tile: 1 to 4096, so many rows of every product: then a row's bits depend on M and on no
        other row or call, as `linear_kept_logprobs` has them. None: as many as are fastest.

    Raises:
      TypeError, ValueError: the kept sets are not of these rows or cannot be (`check_kept`), or as
        `linear_topk_logprobs`.
    """
    hidden, head = check_floats("hidden", hidden), check_matrix("head", head, "[V, H]")
    rows = hidden.shape[:-1]
    token_ids = array_of("token_ids", token_ids, "integers", rows, "one a row of hidden")
    sets = sets_of(kept, rows, head.shape[0])
    flat: PaddedKept = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(rows) :]), sets)
    states = hidden.reshape(-1, hidden.shape[-1])
    ids = jnp.asarray(token_ids, jnp.int32).reshape(-1)
    t = _temperatures(temperatures, rows).reshape(-1)
    call = compiled(_learner_logprobs, logits_dtype, soft_cap, check_tile(row_tile))
    logprobs = call(states, head, ids, flat, t)
    return logprobs.reshape(rows)


def _learner_logprobs(
    logits_dtype: str,
    soft_cap: float | None,
    row_tile: int | None,
    states: jax.Array,
    head: jax.Array,
    ids: jax.Array,
    flat: PaddedKept,
    t: jax.Array,
) -> Float32[Array, " R"]:
    """`learner_logprobs` of flat rows."""
    t = _usable(t)
    flat = flat._replace(token_ids=jnp.where(is_id(flat), flat.token_ids, -1))
    of_set = linear_kept_logprobs(
        states, head, ids, flat.token_ids,
        temperatures=t, logits_dtype=logits_dtype, soft_cap=soft_cap, row_tile=row_tile,
    ).logprobs  # fmt: skip
    marked = flat.counts < 0

    def read_all() -> jax.Array:
        results = linear_topk_logprobs(
            states, head, ids, 0,
            temperatures=t, logits_dtype=logits_dtype, soft_cap=soft_cap, row_tile=row_tile,
        )  # fmt: skip
        return results.logprobs[:, 0] - flat.log_kept

    row_logprobs = lax.cond(jnp.any(marked), read_all, lambda: jnp.zeros_like(of_set))
    logprobs = jnp.where(marked, row_logprobs, of_set)
    return jnp.where(flat.counts == 0, 0.0, logprobs)
