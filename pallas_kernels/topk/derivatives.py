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

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.contract import changes as of_logits
from pallas_kernels.contract.changes import Changes
from pallas_kernels.contract.rows import Rows
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.lowering import typed
from pallas_kernels.meshes.placement import WHOLE, VocabShard

RowsCall = Callable[[Rows], TopkLogprobs]


def transformable(call: RowsCall, shard: VocabShard = WHOLE) -> RowsCall:
    """The call with rules of its own for `vmap`, `jvp` and so `grad`.

    Args:
      call: of rows with extra ids, C of them may be 0.
      shard: the vocabulary's columns that their logits hold.

    Returns:
      A function of rows.
    """
    batched = jax.custom_batching.custom_vmap(call)

    @batched.def_vmap
    def _vmap(
        axis_size: int, is_batched: list[Rows], rows: Rows
    ) -> tuple[TopkLogprobs, TopkLogprobs]:
        out = _folded(batched, axis_size, is_batched[0], rows)
        return out, jax.tree.map(lambda _: True, out)

    # The call itself has no derivative; the logprobs that it found get one.
    differentiable = jax.custom_jvp(lambda out, _: _with_derivative(out))

    @differentiable.defjvp
    def _jvp(
        primals: tuple[TopkLogprobs, Rows], tangents: tuple[TopkLogprobs, Rows]
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        (out, rows), (_, moved) = primals, tangents
        return differentiable(out, rows), _tangent(shard, out, rows, moved)

    def transformed(rows: Rows) -> TopkLogprobs:
        rows = rows._replace(extra_token_ids=rows.extra_ids)
        out: TopkLogprobs = batched(jax.lax.stop_gradient(rows))
        return out._replace(**differentiable(out, rows))

    return transformed


def _with_derivative(out: TopkLogprobs) -> dict[str, jax.Array]:
    """The results that have a derivative, by name."""
    names = ("logprobs", "extra_logprobs", "log_sum_exp", "entropy", "top_logits")
    return {name: x for name in names if (x := getattr(out, name)) is not None}


def _folded(call: RowsCall, size: int, is_batched: Rows, rows: Rows) -> TopkLogprobs:
    """`size` calls as one: the outputs [size, R, ...]."""
    logits, logits_batched = rows.logits, bool(is_batched.logits)

    def with_batch_axis(x: jax.Array, is_batched: bool) -> jax.Array:
        """x with a leading axis [size, ...]."""
        return x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))

    no_logits = jnp.zeros(0, jnp.float32)  # the logits stay as they are
    flags: Any = is_batched  # in the arrays' places
    rows = typed.tree_map(
        with_batch_axis, rows._replace(logits=no_logits), flags._replace(logits=True)
    )._replace(logits=logits)
    assert rows.extra_token_ids is not None
    num_targets = rows.extra_token_ids.shape[1]
    num_logits_rows = logits.shape[-2]
    index = jnp.broadcast_to(jnp.arange(num_targets, dtype=jnp.int32), (size, num_targets))
    active = None if rows.num_rows is None else index < rows.num_rows[:, None]
    row_ids = rows.row_ids
    if row_ids is not None or active is not None or not logits_batched:
        row_ids = index if row_ids is None else row_ids
        inside = (row_ids >= 0) & (row_ids < num_logits_rows)
        inside = inside if active is None else inside & active
        first = jnp.arange(size, dtype=jnp.int32)[:, None] * num_logits_rows
        row_ids = jnp.where(inside, row_ids + first if logits_batched else row_ids, jnp.int32(-1))

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(size * x.shape[1], *x.shape[2:])

    more = rows._replace(logits=no_logits[None], row_ids=row_ids, num_rows=None)
    folded: Rows = jax.tree.map(flat, more)
    out = call(folded._replace(logits=flat(logits) if logits_batched else logits))
    return TopkLogprobs(
        *jax.tree.map(lambda x: x.reshape(size, num_targets, *x.shape[1:]), tuple(out))
    )


def _tangent(shard: VocabShard, out: TopkLogprobs, rows: Rows, moved: Rows) -> dict[str, jax.Array]:
    """The change of `_with_derivative` by a change of logits, temperatures and biases."""
    k, temperatures = out.token_ids.shape[1] - 1, rows.temperatures
    ids = jnp.concatenate([out.token_ids, rows.extra_ids], axis=1)
    logprobs = jnp.concatenate([out.logprobs, out.extra_logprobs], axis=1)
    is_token = ~jnp.isnan(logprobs) & (ids >= 0)

    x, dx = _changed(shard, rows, moved)
    maximum = shard.maximum(x)
    # A row with an answer is valid. Others get zeros: 0 * NaN would not be 0 when transposed.
    sums = (x for x in (out.log_sum_exp, out.entropy) if x is not None)
    valid = functools.reduce(operator.or_, (~jnp.isnan(x) for x in sums), is_token.any(axis=1))
    maximum = jnp.where(valid, maximum, 0)
    shifted = jnp.where(valid[:, None], x - maximum[:, None], -jnp.inf)
    t = None
    if temperatures is not None:
        # 0 is read as 1. So is one without a meaning: its row has no answer, and no derivative.
        divides = (temperatures > 0) & jnp.isfinite(temperatures)
        t = jnp.where(divides, temperatures, jnp.float32(1))[:, None]
        shifted = shifted / t
    total = shard.sum(jnp.exp(shifted))
    # Exponentials of their own, instead of these over their sum: XLA makes no array of either.
    log_total = jnp.log(jnp.where(total > 0, total, 1))
    weights = jnp.exp(shifted - log_total[:, None])
    finite = jnp.where(jnp.isfinite(shifted), shifted, 0)  # s
    if out.entropy is None:
        center = shard.sum(weights * finite)[:, None]
    else:  # known without another pass
        center = jnp.where(jnp.isnan(out.entropy), 0, log_total - out.entropy)[:, None]

    named = _named(dx, jnp.where(is_token, ids, 0), shard)
    mean = shard.sum(weights * dx)[:, None]
    change, of_sum, of_entropy = named - mean, mean, -_weighted(shard, weights, finite, center, dx)
    if t is not None:
        change, of_sum, of_entropy = change / t, of_sum / t, of_entropy / t
        scaled = _named(x, jnp.where(is_token, ids, 0), shard) - maximum[:, None]
        scaled = jnp.where(jnp.isfinite(scaled), scaled, 0) / t
        # A temperature of 0 is read as 1: a constant, which does not change.
        assert temperatures is not None
        assert moved.temperatures is not None
        slope = jnp.where(temperatures[:, None] == 0, 0.0, moved.temperatures[:, None] / t)
        change += (center - scaled) * slope
        of_sum -= (center + maximum[:, None] / t) * slope
        of_entropy += _weighted(shard, weights, finite, center, finite) * slope
    change = jnp.where(is_token & valid[:, None], change, 0)
    changed = {"logprobs": change[:, : k + 1], "extra_logprobs": change[:, k + 1 :]}

    def answers(x: jax.Array, results: jax.Array) -> jax.Array:
        return jnp.where(jnp.isnan(results) | ~valid, 0, x[:, 0])

    if out.log_sum_exp is not None:
        changed["log_sum_exp"] = answers(of_sum, out.log_sum_exp)
    if out.entropy is not None:
        changed["entropy"] = answers(of_entropy, out.entropy)
    if out.top_logits is not None:
        is_there = valid[:, None] & (ids[:, 1 : k + 1] >= 0)
        changed["top_logits"] = jnp.where(is_there, named[:, 1 : k + 1], 0)
    return changed


def _changed(shard: VocabShard, rows: Rows, moved: Rows) -> tuple[jax.Array, jax.Array]:
    """The changed logits [R, W] float32 of the target rows, and their tangents."""
    changes, width = rows.changes, rows.logits.shape[1]
    x, dx = shard.masked(jnp.asarray(rows.logits)), jnp.asarray(moved.logits)
    if rows.row_ids is not None or rows.num_rows is not None:
        x, dx = x[rows.places], dx[rows.places]
    x, dx = x.astype(jnp.float32), dx.astype(jnp.float32)
    if changes is None:
        return x, dx
    first = shard.ids(width)[0]
    shard_changes = of_logits.of_shard(of_logits.prepared(changes, shard.size(width)), first, width)
    assert shard_changes is not None
    x = of_logits.apply(x, shard_changes)
    if changes.bias is not None:  # by id, in any order: derivatives of sums are sums
        assert changes.bias_token_ids is not None
        assert moved.changes is not None
        inside = (changes.bias_token_ids >= 0) & (changes.bias_token_ids < shard.size(width))
        ids = jnp.where(inside, changes.bias_token_ids, jnp.int32(-1))
        added = Changes(None, ids, moved.changes.bias)
        dx = of_logits.apply(dx, of_logits.of_shard(added, first, width))
    forbidden = of_logits.apply(jnp.zeros_like(dx), Changes(shard_changes.allowed)) == -jnp.inf
    return x, jnp.where(forbidden, 0, dx)


def _named(x: jax.Array, ids: jax.Array, shard: VocabShard) -> jax.Array:
    """x [R, W] at ids [R, C] of all shards' columns: [R, C]."""
    return shard.at_ids(ids, x.shape[1], lambda at: jnp.take_along_axis(x, at, axis=1))


def _weighted(
    shard: VocabShard, weights: jax.Array, s: jax.Array, center: jax.Array, by: jax.Array
) -> jax.Array:
    """[R, 1]: the sum of p (s - mean of s) `by`."""
    return shard.sum(weights * (s - center) * by)[:, None]
