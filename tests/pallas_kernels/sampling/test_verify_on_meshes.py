"""`verify` and `draw` on users' meshes: one device's tokens, and compact collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jax_specdec.device import Drafts, Sampling, verify
from pallas_kernels import topk_logprobs
from pallas_kernels.sampling import draw, emitted_logprobs
from tests.support import quick_compile
from tests.support.collectives import longest_axis
from tests.support.quick_compile import UNOPTIMIZED as QUICK
from tests.support.shards import P, users_mesh

B, S, V = 8, 3, 16_384  # a shard has more columns than a row has candidates


@functools.cache
def inputs():
    """Logits of the target and of the drafter; slots alternate between greedy and sampled."""
    rng = np.random.default_rng(0)
    target = rng.normal(0, 3, (B, S, V)).astype(np.float32)
    draft = (target[:, :-1] + rng.normal(0, 0.5, (B, S - 1, V))).astype(np.float32)
    target[5, 0, 9] = np.nan
    return target, draft  # arrays of jax would keep the mesh around their first use


SAMPLING = Sampling.of(
    B, temperature=np.resize([0, 0.8], B), top_k=40, top_p=0.9, min_p=0.01, seed=np.arange(B)
)
POSITIONS = jnp.arange(B, dtype=jnp.int32) + 7


FLAT = {"rows": P("data", None), "vocabulary": P(None, "model"), "both": P("data", "model")}


@functools.cache
def ragged():
    """The rows of `inputs` among others, in another order; slots miss a row here and there."""
    rng = np.random.default_rng(1)
    target, draft = inputs()
    place = rng.permutation(B * S + 8)[: B * S].reshape(B, S).astype(np.int32)
    flat = np.full((B * S + 8, V), np.nan, np.float32)
    flat[place.reshape(-1)] = target.reshape(-1, V)
    of_drafts = np.concatenate([draft.reshape(-1, V), flat[:8]])  # rows of no slot too
    place[3, 2], place[6] = -1, -1
    allowed = rng.integers(0, 2**32, (len(flat), V // 32), np.uint32)
    bias_ids = rng.integers(0, V, (len(flat), 4)).astype(np.int32)
    bias_ids[:, 0] = np.nanargmax(np.where(np.isnan(flat), -1, flat), axis=1)
    bias = np.full(bias_ids.shape, -2, np.float32)
    changes = {"allowed": allowed | np.uint32(0xFFFF), "bias_token_ids": bias_ids, "bias": bias}
    return (flat, of_drafts), place, changes


def drafted_and_verified_flat(logits, place, changes):
    target, draft = logits
    own = jnp.arange(B, dtype=jnp.int32) * (S - 1)
    drawn = [draw(draft, SAMPLING, POSITIONS + d, row_ids=own + d) for d in range(S - 1)]
    drafts = Drafts.joined(drawn, jnp.full(B, S - 1, jnp.int32))
    verified = verify(target, drafts, SAMPLING, POSITIONS, row_ids=place, **changes)
    return drafts.token_ids, *verified[:2]


@pytest.mark.long
def test_results_of_explicit_axes_can_be_fetched():
    """Outside of `jit` too, where nothing is asked for beside the logprobs: an empty array."""
    x = inputs()[0][:, :1, :500]
    with jax.set_mesh(users_mesh("explicit")):
        rows = jax.device_put(x, NamedSharding(users_mesh("explicit"), P("data")))
        verified = verify(rows, Drafts.none(B, 0, 500), SAMPLING, POSITIONS, k=2)
        emitted = jax.device_get(emitted_logprobs(rows, verified))
    alone = topk_logprobs(x[:, 0], np.asarray(verified.token_ids)[:, 0], 2)
    np.testing.assert_array_equal(emitted.logprobs[:, 0], alone.logprobs)
    assert emitted.extra_logprobs.shape == (B, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "split", "changed"),
    [("explicit", "vocabulary", False), ("automatic", "both", True), ("explicit", "rows", True)],
)
def test_tokens_of_flat_rows_are_those_of_one_device(kind, split, changed):
    """A vocabulary that is split stays so; rows that are split are gathered."""
    logits, place, changes = ragged()
    changes = changes if changed else {}
    expected = quick_compile.jit(drafted_and_verified_flat)(logits, place, changes)
    with jax.set_mesh(users_mesh(kind)):
        logits = jax.device_put(logits, NamedSharding(users_mesh(kind), FLAT[split]))
        program = jax.jit(drafted_and_verified_flat).lower(logits, place, changes).compile(QUICK)
        found = program(logits, place, changes)
    for actual, one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(actual, one)
    assert len(set(np.asarray(found[2]))) > 2  # of no row, and after a refused draft and another
    if split != "rows":
        assert longest_axis(program) < V // 4 + (split == "both")


@pytest.mark.slow
def test_few_tokens_on_automatic_axes_with_drafts_and_without():
    """Drafts that are not there have no axis that could be split; a rule of ones own may close
    over a value of the trace."""
    target, _ = inputs()
    narrow = target[..., :128]
    ids = jnp.argmax(narrow[:, :-1], axis=-1).astype(jnp.int32)

    def verified(logits, ids, share):
        some = Drafts(ids, jnp.full(B, ids.shape[1], jnp.int32))
        none = Drafts(ids[:, :0], jnp.zeros(B, jnp.int32))
        own = {"accept": lambda u, p, q: u * share < p}
        return (
            verify(logits, some, SAMPLING, POSITIONS, **own)[:2],
            verify(logits[:, :1], none, SAMPLING, POSITIONS)[:2],
        )

    of_one = quick_compile.jit(verified)(narrow, ids, 0.5)
    with jax.set_mesh(users_mesh("automatic")):
        split = NamedSharding(users_mesh("automatic"), P("data", None, "model"))
        given = jax.device_put(narrow, split), ids, 0.5
        found = jax.jit(verified).lower(*given).compile(QUICK)(*given)
    for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(of_one), strict=True):
        np.testing.assert_array_equal(actual, expected)
