"""A row's digest is that of its ids and bits, whatever the order, batch, mesh and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import equal_digests, row_digests, topk_logprobs
from pallas_kernels.contract.rows import Rows
from pallas_kernels.meshes.placement import WHOLE
from pallas_kernels.sampling import Drafts, Sampling, emitted_logprobs, row_ids_of, verify
from pallas_kernels.topk.digests import digests_of_part

CODES = {"bfloat16": 1, "float16": 2, "float32": 3}
SALTS = 0x9E3779B9, 0x7F4A7C15


def some_rows(rows=6, vocabulary=1000, dtype="float32"):
    x = np.random.default_rng(vocabulary).normal(size=(rows, vocabulary))
    x[0, :3] = -np.inf, np.nan, -0.0
    return jnp.asarray(x, dtype)


def mixed(x):
    """MurmurHash3's fmix32 of words, in Python's integers."""
    x = x.astype(object)
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * multiplier & 0xFFFFFFFF
    return x ^ (x >> 16)


def expected(x):
    """The digests by NumPy's objects, one token after another."""
    x = np.asarray(x)
    bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(object)
    ids = np.arange(x.shape[1]).astype(object)
    sums = [(mixed(bits ^ mixed(ids ^ salt)).sum(axis=1) % 2**32) for salt in SALTS]
    sums[0] = [int(s) & ~3 | CODES[x.dtype.name] for s in sums[0]]
    return np.stack([np.asarray(s, np.uint32) for s in sums], axis=1)


@pytest.mark.parametrize("dtype", sorted(CODES))
@pytest.mark.parametrize("vocabulary", [1, 37, 264, 2053])
@pytest.mark.parametrize("run", [row_digests, jax.jit(row_digests)])
def test_digests_are_sums_of_hashes(dtype, vocabulary, run):
    x = some_rows(vocabulary=max(vocabulary, 3), dtype=dtype)[:, :vocabulary]
    np.testing.assert_array_equal(run(x), expected(x))


def test_one_flipped_last_bit_is_another_digest():
    """Of 131,072 logits, in 64 of 64 rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 131_072)).astype(np.float32)
    flipped = x.copy()
    columns = rng.integers(0, x.shape[1], 64)
    flipped.view(np.uint32)[np.arange(64), columns] ^= 1
    a, b = row_digests(x), row_digests(flipped)
    assert not equal_digests(a, b).any()
    assert equal_digests(a, row_digests(x.copy())).all()


def test_listed_and_skipped_rows():
    x = some_rows()
    row_ids = jnp.array([5, 0, -1, 6, 2, 2], jnp.int32)
    words = np.asarray(row_digests(x, row_ids=row_ids, num_rows=5))
    rows = expected(x)
    np.testing.assert_array_equal(words[[0, 1, 4]], rows[[5, 0, 2]])
    assert not words[[2, 3, 5]].any()
    assert not np.asarray(equal_digests(words, words))[[2, 3, 5]].any()
    assert not np.asarray(row_digests(x, num_rows=2))[2:].any()
    assert row_digests(x[:0]).shape == (0, 2)


def test_blocks_of_rows_have_the_rows_digests():
    """Also where a block of rows is copied, as many logits are read."""
    x = some_rows(200, 20_000)
    words = np.asarray(row_digests(x))
    for rows in ([0], [199], [70, 3]):
        np.testing.assert_array_equal(words[rows], row_digests(x[jnp.array(rows)]))


@pytest.mark.parametrize("vocabulary", [2048, 1000])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_mesh_or_padding_changes_a_digest(vocabulary, kind):
    x = some_rows(8, vocabulary)
    alone = np.asarray(row_digests(x))
    padded = jnp.pad(x, ((0, 0), (0, 24)), constant_values=jnp.nan)
    np.testing.assert_array_equal(row_digests(padded, vocab_size=vocabulary), alone)
    ids = jnp.array([3, 7, 0], jnp.int32)
    for rows, shards in ((1, 2), (1, 8), (2, 4), (2, 1)):
        devices = np.array(jax.devices()[: rows * shards]).reshape(rows, shards)
        mesh = Mesh(devices, ("r", "v"), axis_types=(kind,) * 2)
        sharding = NamedSharding(mesh, PartitionSpec("r", "v"))
        split = jax.device_put(padded, sharding)
        options = {"vocab_size": vocabulary}
        np.testing.assert_array_equal(row_digests(split, **options), alone)
        np.testing.assert_array_equal(
            jax.jit(lambda x: row_digests(x, vocab_size=vocabulary))(split), alone
        )
        np.testing.assert_array_equal(row_digests(split, row_ids=ids, **options), alone[ids])


def test_transformations_keep_digests():
    x = some_rows(8)
    alone = np.asarray(row_digests(x))
    by_vmap = jax.vmap(row_digests)(x.reshape(4, 2, -1))
    np.testing.assert_array_equal(by_vmap.reshape(8, 2), alone)
    _, by_scan = jax.lax.scan(lambda c, x: (c, row_digests(x)), 0, x.reshape(4, 2, -1))
    np.testing.assert_array_equal(by_scan.reshape(8, 2), alone)

    def loss(x):
        results = topk_logprobs(x, jnp.zeros(8, jnp.int32), 0, digests=True)
        return jnp.nansum(results.logprobs), results.digests

    (_, words), slope = jax.value_and_grad(loss, has_aux=True)(x[1:].repeat(2, 0)[:8])
    assert words.shape == (8, 2)
    assert slope.shape == (8, 1000)


@pytest.mark.long
def test_the_doors_calls_give_digests_of_what_they_were_given():
    """Before masks and biases, by slot and position, of dense and of flat rows."""
    x = some_rows(6)[1:]
    x = jnp.concatenate([x, x[:1]])
    ids = jnp.zeros(6, jnp.int32)
    allowed = jnp.zeros((6, 32), jnp.uint32).at[:, 0].set(1)
    results = topk_logprobs(x, ids, 2, allowed=allowed, digests=True)
    np.testing.assert_array_equal(results.digests, expected(x))
    assert topk_logprobs(x, ids, 2).digests is None
    num = jnp.array([1, 1, 0], jnp.int32)
    drafts = Drafts(jnp.zeros((3, 1), jnp.int32), num)
    sampling, positions = Sampling.of(3, temperature=0.8), jnp.zeros(3, jnp.int32)
    verified = verify(x.reshape(3, 2, -1), drafts, sampling, positions, k=2)
    by_slot = emitted_logprobs(x.reshape(3, 2, -1), verified, digests=True)
    np.testing.assert_array_equal(by_slot.digests, expected(x).reshape(3, 2, 2))
    row_ids = row_ids_of(num + 1, 2)
    verified = verify(x, drafts, sampling, positions, row_ids=row_ids, k=2)
    flat = emitted_logprobs(x, verified, digests=True)
    np.testing.assert_array_equal(flat.digests.reshape(6, 2)[:5], expected(x)[:5])
    assert not np.asarray(flat.digests[2, 1]).any()


def test_other_dtypes_and_shapes_are_refused():
    x = some_rows()
    a, b = row_digests(x), row_digests(x.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="float32 logits and b of bfloat16"):
        equal_digests(a, b)
    assert not jax.jit(equal_digests)(a, b).any()
    with pytest.raises(ValueError, match=r"\(6, 2\) and b \(5, 2\)"):
        equal_digests(a, a[:5])
    with pytest.raises(TypeError, match="b is no digest"):
        equal_digests(a, np.zeros((6, 2), np.int32))
    with pytest.raises(TypeError, match="digests"):
        topk_logprobs(x, jnp.zeros(6, jnp.int32), 0, digests=1)
    with pytest.raises((TypeError, ValueError), match="logits"):
        row_digests(x[0])


def test_hashes_that_forget_the_ids_are_noticed(monkeypatch):
    """The negative control of the tests above."""
    x = some_rows()
    monkeypatch.setattr("pallas_kernels.topk.digests.SALTS", (0, 0))  # of words, and so of ids
    assert not (np.asarray(digests_of_part(WHOLE, Rows(x))) == expected(x)).all()
