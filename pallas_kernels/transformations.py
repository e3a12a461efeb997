"""`vmap`, `jvp` and `grad` of the calls, defined once for all implementations.

A batch is folded into rows: one call on A * R target rows, whatever the kernels' own batching rule
would do. The derivative is written down instead of traced, since a loop of unknown length has no
reverse mode, and a kernel has neither:

    d logprob[r, c] = (dx[id] - sum_v p[v] dx[v]) / T        x: row r's logits, p: softmax(x / T)

for a row without an invalid value and a token inside the vocabulary; everywhere else it is 0. The
temperature's derivative is the same with -(x[v] - m) / T in the place of dx[v]. Ids and token ranks
have none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.finish import skipped_rows, usable_temperatures
from pallas_kernels.sharding.vocab_shard import WHOLE, VocabShard, named_logits
from pallas_kernels.types import TopkLogprobs

Call = Callable[..., TopkLogprobs]


def transformable(call: Call, shard: VocabShard = WHOLE) -> Call:
    """The call with rules of its own for `vmap`, `jvp` and so `grad`.

    Args:
      call: a function of (logits [N, W], token_ids [R] or None for the greedy choice, row_ids [R]
        or None, num_rows [] or None, temperatures [R] or None, extra_token_ids [R, C]).
      shard: the vocabulary's columns that logits hold.

    Returns:
      A function of the same arguments; extra_token_ids may be None.
    """
    batched = jax.custom_batching.custom_vmap(call)

    @batched.def_vmap
    def _vmap(axis_size: int, is_batched: Any, *arguments: Any) -> tuple[TopkLogprobs, Any]:
        out = _folded(batched, axis_size, is_batched, *arguments)
        return out, jax.tree.map(lambda _: True, out)

    # The call itself has no derivative; the logprobs that it found get one.
    differentiable = jax.custom_jvp(lambda out, *_: (out.logprobs, out.extra_logprobs))

    @differentiable.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        return differentiable(*primals), _tangent(shard, primals, tangents)

    def transformed(
        logits: jax.Array,
        token_ids: jax.Array | None,
        row_ids: jax.Array | None,
        num_rows: jax.Array | None,
        temperatures: jax.Array | None,
        extra_token_ids: jax.Array | None,
    ) -> TopkLogprobs:
        if extra_token_ids is None:
            targets = next(x for x in (token_ids, row_ids, logits) if x is not None)
            extra_token_ids = jnp.zeros((targets.shape[0], 0), jnp.int32)
        constant, t = jax.lax.stop_gradient((logits, temperatures))
        out = batched(constant, token_ids, row_ids, num_rows, t, extra_token_ids)
        logprobs, extra = differentiable(out, logits, row_ids, temperatures, extra_token_ids)
        return TopkLogprobs(out.token_ids, logprobs, out.token_ranks, extra)

    return transformed


def _folded(
    call: Call,
    size: int,
    is_batched: Any,
    logits: jax.Array,
    token_ids: jax.Array | None,
    row_ids: jax.Array | None,
    num_rows: jax.Array | None,
    temperatures: jax.Array | None,
    extra_token_ids: jax.Array,
) -> TopkLogprobs:
    """`size` calls as one: the outputs [size, R, ...]."""
    logits_batched, *_ = is_batched

    def each(x: jax.Array | None, is_batched: Any) -> jax.Array | None:
        """x with a leading axis [size, ...]."""
        if x is None or is_batched:
            return x
        return jnp.broadcast_to(x[None], (size, *x.shape))

    token_ids, row_ids, num_rows, temperatures, extra = map(
        each,
        (token_ids, row_ids, num_rows, temperatures, extra_token_ids),
        is_batched[1:],
    )
    assert extra is not None
    num_targets = extra.shape[1]
    is_greedy = token_ids is None
    if is_greedy and not logits_batched:  # a greedy call reads each row of its logits once
        logits, logits_batched = jnp.broadcast_to(logits[None], (size, *logits.shape)), True
    num_logits_rows = logits.shape[-2]
    index = jnp.broadcast_to(jnp.arange(num_targets, dtype=jnp.int32), (size, num_targets))
    wanted = None if num_rows is None else index < num_rows[:, None]
    if not is_greedy and (row_ids is not None or wanted is not None or not logits_batched):
        rows = index if row_ids is None else row_ids
        inside = (rows >= 0) & (rows < num_logits_rows)
        inside = inside if wanted is None else inside & wanted
        first = jnp.arange(size, dtype=jnp.int32)[:, None] * num_logits_rows
        row_ids = jnp.where(inside, rows + first if logits_batched else rows, jnp.int32(-1))

    def flat(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(size * x.shape[1], *x.shape[2:])

    out = call(
        flat(logits) if logits_batched else logits,
        flat(token_ids),
        flat(row_ids),
        None,
        flat(temperatures),
        flat(extra),
    )
    out = TopkLogprobs(*(x.reshape(size, num_targets, *x.shape[1:]) for x in out))
    if not is_greedy or wanted is None:
        return out
    skipped = skipped_rows(num_targets, out.token_ids.shape[2] - 1, extra.shape[2])

    def where(x: jax.Array, of_skipped: jax.Array) -> jax.Array:
        return jnp.where(wanted.reshape(wanted.shape + (1,) * (x.ndim - 2)), x, of_skipped)

    return TopkLogprobs(*map(where, out, skipped))


def _tangent(shard: VocabShard, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """What a change of the logits and of the temperatures changes of both kinds of logprobs."""
    out, logits, row_ids, temperatures, extra_token_ids = primals
    _, d_logits, _, d_temperatures, _ = tangents
    logits, d_logits = jnp.asarray(logits), jnp.asarray(d_logits)
    num_targets = out.token_ids.shape[0]
    rows = jnp.arange(num_targets, dtype=jnp.int32) if row_ids is None else row_ids
    rows = jnp.clip(rows, 0, logits.shape[0] - 1)
    ids = jnp.concatenate([out.token_ids, extra_token_ids], axis=1)
    logprobs = jnp.concatenate([out.logprobs, out.extra_logprobs], axis=1)
    known = ~jnp.isnan(logprobs) & (ids >= 0)

    x = shard.masked(logits)[rows].astype(jnp.float32)
    maximum = shard.maximum(jnp.where(jnp.isnan(x), -jnp.inf, x))
    valid = jnp.isfinite(maximum) & ~shard.any(jnp.isnan(x))
    # Zeros where a row has no answer: 0 * NaN would not be 0 when this is transposed.
    shifted = jnp.where(valid[:, None], x - jnp.where(valid, maximum, 0)[:, None], -jnp.inf)
    t = None if temperatures is None else usable_temperatures(temperatures)[:, None]
    if t is not None:
        t = jnp.where(jnp.isnan(t), jnp.float32(1), t)
        shifted = shifted / t
    weights = jnp.exp(shifted)
    total = shard.sum(weights)
    weights = weights / jnp.where(total > 0, total, 1)[:, None]

    mean = shard.sum(weights * d_logits[rows].astype(jnp.float32))
    changes = named_logits(d_logits, rows, jnp.where(known, ids, 0), shard) - mean[:, None]
    if t is not None:
        changes = changes / t
        finite = jnp.where(jnp.isfinite(shifted), shifted, 0)
        mean = shard.sum(weights * finite)
        scaled = named_logits(logits, rows, jnp.where(known, ids, 0), shard) - maximum[:, None]
        scaled = jnp.where(jnp.isfinite(scaled), scaled, 0) / t
        # A temperature of 0 is read as 1: a constant, which does not change.
        slope = jnp.where(temperatures[:, None] == 0, 0.0, d_temperatures[:, None] / t)
        changes += (mean[:, None] - scaled) * slope
    changes = jnp.where(known & valid[:, None], changes, 0)
    k = out.logprobs.shape[1] - 1
    return changes[:, : k + 1], changes[:, k + 1 :]
