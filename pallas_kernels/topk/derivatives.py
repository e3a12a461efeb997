"""`vmap`, `jvp` and `grad` of the calls, defined once for all implementations.

A batch is folded into rows: one call on A * R target rows, whatever the kernels' own batching rule
would do. The derivative is written down instead of traced, since a loop of unknown length has no
reverse mode, and a kernel has neither:

    d logprob[r, c]  = (dx[id] - sum_v p[v] dx[v]) / T     x: row r's logits, p: softmax(x / T)
    d log_sum_exp[r] = sum_v p[v] dx[v] / T
    d entropy[r]     = -sum_v p[v] (s[v] - mean of s) dx[v] / T                s = (x - m) / T
    d top_logit[r, c] = dx[id]

for a row without an invalid value and a token inside the vocabulary; everywhere else it is 0. With
changes x is the changed logit: dx[v] is that of the logit plus those of its biases, and 0 for a
forbidden token. The temperature's derivative is the same with -s[v] in the place of dx[v], and of
log_sum_exp with -x[v] / T. Ids and token ranks have none.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends.answers import skipped_rows, usable_temperatures
from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.contract.wanted import Wanted
from pallas_kernels.meshes.vocab_shard import WHOLE, VocabShard

Call = Callable[..., TopkLogprobs]


def transformable(call: Call, shard: VocabShard = WHOLE) -> Call:
    """The call with rules of its own for `vmap`, `jvp` and so `grad`.

    Args:
      call: a function of (logits [N, W], token_ids [R] or None for the greedy choice, row_ids [R]
        or None, num_rows [] or None, temperatures [R] or None, extra_token_ids [R, C],
        `Changes` of R rows or None).
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
    differentiable = jax.custom_jvp(lambda out, *_: _with_derivative(out))

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
        changes: Changes | None = None,
    ) -> TopkLogprobs:
        if extra_token_ids is None:
            targets = next(x for x in (token_ids, row_ids, logits) if x is not None)
            extra_token_ids = jnp.zeros((targets.shape[0], 0), jnp.int32)
        constant, t, other = jax.lax.stop_gradient((logits, temperatures, changes))
        out = batched(constant, token_ids, row_ids, num_rows, t, extra_token_ids, other)
        found = differentiable(out, logits, row_ids, temperatures, extra_token_ids, changes)
        result: TopkLogprobs = out._replace(**found)
        return result

    return transformed


def _with_derivative(out: TopkLogprobs) -> dict[str, jax.Array]:
    """The results that have a derivative, by name."""
    names = ("logprobs", "extra_logprobs", "log_sum_exp", "entropy", "top_logits")
    return {name: x for name in names if (x := getattr(out, name)) is not None}


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
    changes: Changes | None,
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
        is_batched[1:6],
    )
    changes = jax.tree.map(each, changes, is_batched[6])
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
        jax.tree.map(flat, changes),
    )
    out = TopkLogprobs(
        *jax.tree.map(lambda x: x.reshape(size, num_targets, *x.shape[1:]), tuple(out))
    )
    if not is_greedy or wanted is None:
        return out
    like = Wanted(
        out.token_ids.shape[2] - 1,
        out.log_sum_exp is not None,
        out.entropy is not None,
        out.top_logits is not None,
    )
    skipped = skipped_rows(num_targets, like, extra.shape[2])

    def where(x: jax.Array, of_skipped: jax.Array) -> jax.Array:
        return jnp.where(wanted.reshape(wanted.shape + (1,) * (x.ndim - 2)), x, of_skipped)

    result: TopkLogprobs = jax.tree.map(where, out, skipped)
    return result


def _tangent(shard: VocabShard, primals: Any, tangents: Any) -> dict[str, jax.Array]:
    """What a change of logits, temperatures and biases changes of `_with_derivative`."""
    out, logits, row_ids, temperatures, extra_token_ids, changes = primals
    _, d_logits, _, d_temperatures, _, d_changes = tangents
    num_targets, k = out.token_ids.shape[0], out.token_ids.shape[1] - 1
    rows = jnp.arange(num_targets, dtype=jnp.int32) if row_ids is None else row_ids
    rows = jnp.clip(rows, 0, logits.shape[0] - 1)
    ids = jnp.concatenate([out.token_ids, extra_token_ids], axis=1)
    logprobs = jnp.concatenate([out.logprobs, out.extra_logprobs], axis=1)
    known = ~jnp.isnan(logprobs) & (ids >= 0)

    x, dx = _changed(shard, rows, (logits, changes), (d_logits, d_changes))
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
    finite = jnp.where(jnp.isfinite(shifted), shifted, 0)  # s
    center = shard.sum(weights * finite)[:, None]

    named = _named(dx, jnp.where(known, ids, 0), shard)
    mean = shard.sum(weights * dx)[:, None]
    moved, of_sum, of_entropy = named - mean, mean, -_weighted(shard, weights, finite, center, dx)
    if t is not None:
        moved, of_sum, of_entropy = moved / t, of_sum / t, of_entropy / t
        scaled = _named(x, jnp.where(known, ids, 0), shard) - maximum[:, None]
        scaled = jnp.where(jnp.isfinite(scaled), scaled, 0) / t
        # A temperature of 0 is read as 1: a constant, which does not change.
        slope = jnp.where(temperatures[:, None] == 0, 0.0, d_temperatures[:, None] / t)
        moved += (center - scaled) * slope
        of_sum -= (center + jnp.where(valid, maximum, 0)[:, None] / t) * slope
        of_entropy += _weighted(shard, weights, finite, center, finite) * slope
    moved = jnp.where(known & valid[:, None], moved, 0)
    changed = {"logprobs": moved[:, : k + 1], "extra_logprobs": moved[:, k + 1 :]}

    def answers(x: jax.Array, found: jax.Array) -> jax.Array:
        return jnp.where(jnp.isnan(found) | ~valid, 0, x[:, 0])

    if out.log_sum_exp is not None:
        changed["log_sum_exp"] = answers(of_sum, out.log_sum_exp)
    if out.entropy is not None:
        changed["entropy"] = answers(of_entropy, out.entropy)
    if out.top_logits is not None:
        is_there = valid[:, None] & (ids[:, 1 : k + 1] >= 0)
        changed["top_logits"] = jnp.where(is_there, named[:, 1 : k + 1], 0)
    return changed


def _changed(
    shard: VocabShard, rows: jax.Array, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """The changed logits [R, W] float32 of these rows, and their tangents."""
    (logits, changes), (d_logits, d_changes) = primals, tangents
    width = logits.shape[1]
    logits, d_logits = jnp.asarray(logits), jnp.asarray(d_logits)
    x = shard.masked(logits)[rows].astype(jnp.float32)
    dx = d_logits[rows].astype(jnp.float32)
    if changes is None:
        return x, dx
    first = shard.ids(width)[0]
    mine = of_logits.of_shard(of_logits.prepared(changes, shard.size(width)), first, width)
    assert mine is not None
    x = of_logits.apply(x, mine)
    if changes.bias is not None:  # by id, in any order: derivatives of sums are sums
        inside = (changes.bias_token_ids >= 0) & (changes.bias_token_ids < shard.size(width))
        ids = jnp.where(inside, changes.bias_token_ids, jnp.int32(-1))
        moved = Changes(None, ids, d_changes.bias)
        dx = of_logits.apply(dx, of_logits.of_shard(moved, first, width))
    forbidden = of_logits.apply(jnp.zeros_like(dx), Changes(mine.allowed)) == -jnp.inf
    return x, jnp.where(forbidden, 0, dx)


def _named(x: jax.Array, ids: jax.Array, shard: VocabShard) -> jax.Array:
    """x [R, W] at ids [R, C] of all shards' columns: [R, C]."""
    return shard.looked_up(ids, x.shape[1], lambda at: jnp.take_along_axis(x, at, axis=1))


def _weighted(
    shard: VocabShard, weights: jax.Array, s: jax.Array, center: jax.Array, by: jax.Array
) -> jax.Array:
    """[R, 1]: the sum of p (s - mean of s) `by`."""
    return shard.sum(weights * (s - center) * by)[:, None]
