"""What `verify` and `draw` take of a caller: every kind of array; what has no meaning, refused."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling import CompactQ, Drafts, Sampling, draw, truncation, verify
from pallas_kernels.sampling.door import checked_rows
from tests.support import quick_compile, shape_checks

B, D, M, V = 4, 1, 2, 11
LOGITS = np.random.default_rng(0).normal(size=(B, D + 1, V)).astype(np.float32)
POSITIONS = np.arange(B, dtype=np.int32)


def sampling(**changed):
    return Sampling.of(B, seed=np.arange(B))._replace(**changed)


def drafts(**changed):
    ids = np.zeros((B, D, M), np.int32) + np.arange(M, dtype=np.int32)
    q = CompactQ(ids, np.full(ids.shape, np.log(0.5), np.float32))
    plain = Drafts(np.zeros((B, D), np.int32), np.ones(B, np.int32), q)
    return plain._replace(**changed)


def seeds_taken(seed):
    return np.asarray(checked_rows(LOGITS, sampling(seed=seed), POSITIONS)[1].seed)


@pytest.mark.fast
@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
def test_seeds_of_any_integer_type_count_modulo_2_32(dtype):
    """As they come, traced or not; negative ones too."""
    info = np.iinfo(dtype)
    given = np.array([0, 1, info.max, info.min], dtype)
    expected = np.array([int(x) % 2**32 for x in given], np.uint32)
    found = seeds_taken(given)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, expected)
    if dtype not in ("int64", "uint64"):  # which JAX does not have by default
        np.testing.assert_array_equal(seeds_taken(jnp.asarray(given)), expected)
        traced = jax.jit(lambda seed: checked_rows(LOGITS, sampling(seed=seed), POSITIONS)[1].seed)
        np.testing.assert_array_equal(traced(given), expected)


def test_numbers_of_other_widths():
    """64 bits where JAX has them, 16 bits for temperatures."""
    with jax.enable_x64(True):
        wide = jnp.array([-1, 2**32 + 5, 2**40, 3])
        np.testing.assert_array_equal(seeds_taken(wide), [2**32 - 1, 5, 0, 3])
        top_k = checked_rows(LOGITS, sampling(top_k=wide), POSITIONS)[1].top_k
        np.testing.assert_array_equal(top_k, [-1, 2**31 - 1, 2**31 - 1, 3])
    for dtype in (jnp.bfloat16, np.float64):
        _, taken, places, _ = checked_rows(
            LOGITS, sampling(temperature=np.full(B, 0.5, dtype)), POSITIONS.astype(np.int64)
        )
        assert taken.temperature.dtype == jnp.float32
        assert places.dtype == jnp.int32
        np.testing.assert_array_equal(taken.temperature, [0.5] * B)


def test_parameters_from_one_number_for_all_slots():
    made = Sampling.of(3, temperature=0.5, top_k=np.array([1, 2, 3]), seed=2**64 - 1)
    assert [x.dtype for x in made] == ["float32", "int32", "float32", "float32", "uint32"]
    np.testing.assert_array_equal(made.temperature, [0.5] * 3)
    np.testing.assert_array_equal(made.top_k, [1, 2, 3])
    np.testing.assert_array_equal(made.top_p, [1] * 3)
    np.testing.assert_array_equal(made.seed, [2**32 - 1] * 3)
    chex.assert_trees_all_equal(Sampling.greedy(2), Sampling.of(2, temperature=0))


@pytest.mark.parametrize("is_typed", [True, False])
def test_seeds_of_a_key_are_its_bits(is_typed):
    """One key for all slots or one a slot, typed or as data; also under jit."""
    make = jax.random.key if is_typed else jax.random.PRNGKey
    key = make(7)
    sampling = Sampling.of(3, temperature=0.5, key=key)
    np.testing.assert_array_equal(sampling.seed, jax.random.bits(key, (3,), jnp.uint32))
    np.testing.assert_array_equal(jax.jit(lambda k: Sampling.of(3, key=k).seed)(key), sampling.seed)
    keys = jax.random.split(key, 3)
    of_slots = Sampling.of(3, key=keys).seed
    assert of_slots.tolist() == [jax.random.bits(k, (), jnp.uint32).item() for k in keys]
    assert len({*Sampling.of(3, key=make(8)).seed.tolist(), *sampling.seed.tolist()}) == 6


KEYS = jax.random.split(jax.random.key(0), B)
WRONG_Q = CompactQ(np.zeros((B, D, M), np.int32), LOGITS[:, :1, :1])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "value", "kind", "words"),
    [
        ("logits", LOGITS[:, 0], ValueError, r" \(4, 11\): give \[B, S, V\]"),
        ("logits", LOGITS.tolist(), TypeError, " is a list: give a NumPy or JAX array"),
        ("logits", LOGITS.astype(np.float64), TypeError, " is of float64: give bfloat16"),
        ("logits", LOGITS.astype(np.int32), TypeError, " is of int32: give bfloat16"),
        ("logits", LOGITS[..., :0], ValueError, r" \(4, 2, 0\) has no number"),
        ("logits", LOGITS[:0], ValueError, r" \(0, 2, 11\) has no number"),
        ("k", 12, ValueError, " = 12 is outside 0 .. 11"),
        ("k", np.float32(2), TypeError, " is .*; it must be a Python int"),
        ("drafts", np.zeros((B, D), np.int32), TypeError, " is a ndarray: give `Drafts"),
        ("sampling", None, TypeError, " is a NoneType: give a `Sampling`"),
        ("sampling.seed", np.ones(B), TypeError, " is of float64"),
        ("sampling.seed", KEYS, TypeError, " is of a JAX key"),
        ("sampling.seed", jax.random.key_data(KEYS), TypeError,
         r" \(4, 2\) looks like JAX keys: give one integer a slot"),
        ("sampling.temperature", np.float32([1, 0, np.nan, 1]), ValueError, " has a NaN in slot 2"),
        ("sampling.top_p", jnp.full(B, jnp.nan), ValueError, " has a NaN in slot 0"),
        ("sampling.min_p", np.full(B, np.nan, np.float32), ValueError, " has a NaN"),
        ("sampling.top_k", np.zeros(1, np.int32), ValueError,
         r" \(1,\) does not go with logits \(4, 2, 11\)"),
        ("positions", jnp.int32(0), ValueError, r" \(\) does not go with logits"),
        ("positions", np.ones(B), TypeError, " is of float64: give an array of int"),
        ("drafts.num", np.full(B, 2, np.int32), ValueError, " has 2: each slot has 0 to D = 1 dr"),
        ("drafts.num", -np.ones(B, np.int32), ValueError, " has -1"),
        ("drafts.num", np.ones(1, np.int32), ValueError, r" \(1,\) does not"),
        ("drafts.q", np.zeros((B, D, M), np.float32), TypeError, " is a ndarray: give `CompactQ"),
        ("drafts.q", WRONG_Q, ValueError, r" has ids \(4, 1, 2\) and logprobs \(4, 1, 1\)"),
        ("drafts", drafts(token_ids=np.zeros((B, 3), np.int32), q=None), ValueError,
         r" \(4, 3\) do not go with logits \(4, 2, 11\): .* verify .* = \(4, 1\) dr"),
    ],
)  # fmt: skip
def test_refused(name, value, kind, words):
    usual = {"logits": LOGITS, "drafts": drafts(), "sampling": sampling(), "positions": POSITIONS}
    where, _, field = name.partition(".")
    value = usual[where]._replace(**{field: value}) if field else value
    with pytest.raises(kind, match=name + words):
        shape_checks.as_users_run(verify)(**usual | {where: value})
    with pytest.raises(ValueError, match=r"k = 10 is outside 0 .. 9"):
        shape_checks.as_users_run(verify)(**usual, k=10, vocab_size=9)


def test_temperatures_that_are_not_above_0():
    """0 or less is greedy; NaN, which is known only once it runs, makes the slot's rows invalid."""
    greedy = LOGITS.argmax(axis=-1)
    proposed = drafts(token_ids=greedy[:, :1].astype(np.int32), q=None)
    call = quick_compile.jit(verify)
    temperature = np.array([0, -1, np.nan, -np.inf], np.float32)
    found = call(LOGITS, proposed, sampling(temperature=temperature), POSITIONS)
    np.testing.assert_array_equal(found.num_tokens, [2, 2, 1, 2])
    np.testing.assert_array_equal(np.asarray(found.token_ids)[:, 0], greedy[:, 0])
    np.testing.assert_array_equal(found.token_ids[2], [greedy[2, 0], -1])
    # Beside sampled slots, and with the other parameters.
    mixed = {
        "temperature": np.array([1, 0, 0.5, -2], np.float32),
        "top_p": np.array([np.nan, 1, 1, 1], np.float32),
        "min_p": np.array([0, 0, np.nan, 0], np.float32),
    }
    found = call(LOGITS, proposed, sampling(**mixed), POSITIONS)
    np.testing.assert_array_equal(found.num_tokens, [1, 2, 1, 2])
    np.testing.assert_array_equal(np.asarray(found.token_ids)[:, 0], greedy[:, 0])


def test_numbers_without_meaning_draw_and_keep_the_greedy_token():
    rows = LOGITS[:, :1]
    greedy = rows.argmax(axis=-1)
    nan = np.array([np.nan] * B, np.float32)
    for name in ("temperature", "top_p", "min_p"):
        slots = sampling(**({"temperature": np.ones(B, np.float32)} | {name: nan}))
        drawn = quick_compile.jit(draw)(rows, slots, POSITIONS)
        np.testing.assert_array_equal(drawn.token_ids, greedy, err_msg=name)
        np.testing.assert_array_equal(np.exp(drawn.q.logprobs).sum(axis=2), 1)
        np.testing.assert_array_equal(drawn.q.logprobs.max(axis=2), 0)
        cut = quick_compile.jit(truncation)(rows, slots)
        np.testing.assert_array_equal(cut.cut_id, greedy, err_msg=name)
        assert np.isposinf(cut.cut_logit).all()
