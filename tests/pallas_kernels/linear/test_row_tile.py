"""Rows in tiles: one row's bits in every call, batch and gradient, and on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from ipc.wire import KEPT_MANY
from pallas_kernels import (
    linear_kept_logprobs,
    linear_support_kl,
    linear_topk_logprobs,
    topk_logprobs,
)
from pallas_kernels.linear import schedule as schedules
from pallas_kernels.linear import tiles
from pallas_kernels.sampling import learner_logprobs
from tests.support import quick_compile
from tests.support.shards import P

R, V, H, C, K, TILE = 104, 2563, 96, 40, 5, 8  # V: two products of the head, no whole groups


@functools.cache
def case(dtype="float32"):
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(V)[:C] for _ in range(R)]).astype(np.int32)
    ids[3, 2:] = -1
    teacher = np.log(rng.dirichlet(np.ones(C + 1), R)[:, :C]).astype(np.float32)
    return {
        "hidden": jnp.asarray(rng.normal(size=(R, H)), dtype),
        "head": jnp.asarray(0.3 * rng.normal(size=(V, H)), dtype),
        "bias": jnp.asarray(rng.normal(size=V), jnp.float32),
        "temperatures": jnp.asarray(rng.uniform(0.5, 2, R), jnp.float32),
        "ids": jnp.asarray(ids),
        "teacher": jnp.asarray(teacher),
    }


def topk(arrays, **how):
    return linear_topk_logprobs(
        arrays["hidden"], arrays["head"], arrays["ids"][:, 0], K, bias=arrays["bias"],
        temperatures=arrays["temperatures"], extra_token_ids=arrays["ids"], entropy=True,
        log_sum_exp=True, soft_cap=20.0, **how,
    )  # fmt: skip


def kept(arrays, **how):
    given = arrays["hidden"], arrays["head"], arrays["ids"][:, 0], arrays["ids"]
    return linear_kept_logprobs(
        *given, bias=arrays["bias"], temperatures=arrays["temperatures"], **how
    )


def support(arrays, **how):
    given = arrays["hidden"], arrays["head"], arrays["ids"], arrays["teacher"]
    return linear_support_kl(
        *given, bias=arrays["bias"], temperatures=arrays["temperatures"], **how
    )


def learner(arrays, **how):
    """Rows by turns of a set, and of the whole vocabulary."""
    ids = arrays["ids"]
    counts = jnp.where(ids[:, 0] % 2 == 0, (ids >= 0).sum(1), KEPT_MANY)
    sets = ids, counts, jnp.where(counts < 0, jnp.float32(-0.1), 0)
    of_rows = arrays["hidden"], arrays["head"], ids[:, 0]
    return learner_logprobs(*of_rows, sets, arrays["temperatures"], **how)


CALLS = {"topk": topk, "kept": kept, "support": support}
ROW_CALLS = CALLS | {"learner": learner}  # it takes no mesh
OF_HEAD = ("head", "bias")


def rows_of(arrays, rows):
    """The arrays with some of the rows."""
    return {name: x if name in OF_HEAD else x[jnp.asarray(rows)] for name, x in arrays.items()}


def as_users(call, **how):
    """The call as XLA compiles it for users: bits must not depend on the suite's options."""
    return quick_compile.as_users(lambda arrays: call(arrays, **how))


def bits(results, rows=slice(None)):
    """The bits of a tree of arrays [R, ...] of 32 bits, of these rows."""
    return [
        (x.shape[1:], np.asarray(x)[rows].view(np.uint32).tolist())
        for x in jax.tree.leaves(results)
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", ROW_CALLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_batch_changes_a_bit_of_a_row(name, dtype):
    arrays = case(dtype)
    whole = as_users(ROW_CALLS[name], row_tile=TILE)(arrays)
    order = np.random.default_rng(1).permutation(R)
    for rows in ([0], [5, 4, 3], range(TILE), range(7, 30), order):
        found = as_users(ROW_CALLS[name], row_tile=TILE)(rows_of(arrays, np.array(rows)))
        assert bits(found) == bits(whole, np.array(rows)), rows


@pytest.mark.parametrize("name", ROW_CALLS)
def test_products_of_other_shapes_change_bits(name):
    """The control: without tiles a row's bits depend on the others."""
    arrays = case()
    whole = as_users(ROW_CALLS[name])(arrays)
    for number in (1, 3, 5, 8, 20):
        few = as_users(ROW_CALLS[name])(rows_of(arrays, np.arange(number)))
        if bits(few) != bits(whole, slice(number)):
            return
    raise AssertionError("all have the same bits: the other tests would prove nothing")


def on_mesh(arrays, rows, shards):
    """A mesh, and the arrays split over it: the head's by columns, with padding."""
    mesh = Mesh(np.array(jax.devices()[: rows * shards]).reshape(rows, shards), ("r", "v"))
    split = {name: NamedSharding(mesh, P("v") if name in OF_HEAD else P("r")) for name in arrays}
    padded = {
        name: jnp.pad(arrays[name], ((0, -len(arrays[name]) % shards), *((0, 0),) * more))
        for name, more in zip(OF_HEAD, (1, 0), strict=True)
    }
    return mesh, jax.device_put(arrays | padded, split)


@pytest.mark.parametrize("name", CALLS)
def test_no_mesh_changes_a_bit_of_a_row(name):
    """Shards with whole groups, groups that two share, padding, and less than one product."""
    arrays = case()
    whole = bits(as_users(CALLS[name], row_tile=TILE)(arrays))
    for rows, shards in ((1, 2), (1, 8), (2, 4), (4, 1)):
        mesh, split = on_mesh(arrays, rows, shards)
        where = {"mesh": mesh, "axis_name": "v", "row_axis_name": "r", "vocab_size": V}
        found = as_users(CALLS[name], row_tile=TILE, **where)(split)
        assert bits(found) == whole, (rows, shards)


def test_narrow_shards_are_gathered():
    """A shard of fewer tokens than a group has."""
    arrays = case() | {"head": case()["head"][:500], "bias": case()["bias"][:500]}
    arrays["ids"] = arrays["ids"] % 500
    whole = bits(as_users(topk, row_tile=TILE)(arrays))
    mesh, split = on_mesh(arrays, 1, 4)
    where = {"mesh": mesh, "axis_name": "v"}
    assert bits(as_users(topk, row_tile=TILE, **where)(split)) == whole


def test_no_option_changes_a_bit_of_a_row():
    """K, row ids, the number of rows, eager or not, and the forward pass of a gradient."""
    arrays = case()
    given = arrays["head"], arrays["ids"][:, 0]
    run = quick_compile.as_users(
        lambda hidden, head, ids, k=0, **how: linear_topk_logprobs(
            hidden, head, ids, k, row_tile=TILE, **how
        ),
        static_argnames="k",
    )
    logprobs = run(arrays["hidden"], *given).logprobs[:, 0]
    for how in ({"k": 20}, {"num_rows": 83}, {"extra_token_ids": arrays["ids"]}):
        found = run(arrays["hidden"], *given, **how).logprobs[:, 0]
        assert bits(found, slice(83)) == bits(logprobs, slice(83)), how
    order = jnp.asarray(np.random.default_rng(2).integers(0, R, 50), jnp.int32)
    found = run(arrays["hidden"], given[0], given[1][order], row_ids=order).logprobs[:, 0]
    assert bits(found) == bits(logprobs, np.asarray(order))

    def loss(hidden):
        found = linear_topk_logprobs(hidden, *given, 0, row_tile=TILE).logprobs[:, 0]
        return found.sum(), found

    (_, found), gradient = quick_compile.as_users(jax.value_and_grad(loss, has_aux=True))(
        arrays["hidden"]
    )
    assert bits(found) == bits(logprobs)
    plain = jax.grad(lambda x: linear_topk_logprobs(x, *given, 0).logprobs[:, 0].sum())
    np.testing.assert_allclose(gradient, plain(arrays["hidden"]), atol=2e-5)


def test_sums_are_those_of_the_logits_own_call():
    """The logprobs are those of `topk_logprobs` of the tiles' logits, to the bit."""
    arrays = case()
    call = tiles.Call(tiles.Definition(), K, False, tiles.WHOLE, row_tile=TILE)
    logits = jnp.concatenate([
        tiles.logits_of_tile(call, hidden, arrays["head"], None, jnp.int32(0))
        for hidden in jnp.split(arrays["hidden"], R // TILE)
    ])  # fmt: skip
    ids = arrays["ids"][:, 0]
    plain = topk_logprobs(logits, ids, K)
    tiled = linear_topk_logprobs(arrays["hidden"], arrays["head"], ids, K, row_tile=TILE)
    assert bits(tiled.logprobs) == bits(plain.logprobs)
    assert (np.asarray(tiled.token_ids) == plain.token_ids).all()
    assert (np.asarray(tiled.token_ranks) == plain.token_ranks).all()


def test_divergences_in_tiles_are_those_without():
    """Invalid rows too: a NaN of the support or beside it, a teacher of too much mass."""
    arrays = dict(case())
    arrays["hidden"] = arrays["hidden"].at[7, 0].set(jnp.nan)
    arrays["teacher"] = arrays["teacher"].at[9].set(0.0)
    arrays["temperatures"] = arrays["temperatures"].at[11].set(-1.0)
    for divergence in ("forward", "reverse", "jensen_shannon"):
        call = functools.partial(support, divergence=divergence)
        tiled = quick_compile.jit(functools.partial(call, row_tile=TILE))(arrays)
        plain = quick_compile.jit(call)(arrays)
        assert np.isnan(plain[jnp.array([7, 9, 11])]).all()
        np.testing.assert_allclose(tiled, plain, rtol=1e-5, atol=1e-6)


def test_row_blocks_of_a_split_head(monkeypatch):
    """Without tiles: many rows of a vocabulary's shard are read in blocks, and their loop's state
    must not vary over the shards."""
    monkeypatch.setattr(
        "pallas_kernels.linear.forward.choose_linear_schedule",
        lambda rows, width, *_: schedules.LinearSchedule(16, width, width, 8),
    )
    arrays = case()
    mesh, split = on_mesh(arrays, 1, 2)
    where = {"mesh": mesh, "axis_name": "v", "vocab_size": V}
    ids = arrays["ids"][:, 0]
    found = linear_topk_logprobs(arrays["hidden"], split["head"], ids, K, scale=1.5, **where)
    plain = linear_topk_logprobs(arrays["hidden"], arrays["head"], ids, K, scale=1.5)
    assert (np.asarray(found.token_ids) == plain.token_ids).all()
    np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=1e-5)


@pytest.mark.fast
@pytest.mark.parametrize("call", ROW_CALLS.values())
@pytest.mark.parametrize(
    ("tile", "error", "words"),
    [(0, ValueError, "row_tile = 0 must be 1 to 4096"), (4097, ValueError, "32 is a good size"),
     (True, TypeError, "row_tile = True must be a Python int"), (8.0, TypeError, "row_tile = 8.0")],
)  # fmt: skip
def test_wrong_tiles_are_refused(call, tile, error, words):
    with pytest.raises(error, match=words):
        call(case(), row_tile=tile)
