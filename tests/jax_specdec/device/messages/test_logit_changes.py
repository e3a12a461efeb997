"""The changed logits of rows, by hand, at their edges, and split among devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.messages.logit_changes import (
    RowChanges,
    Written,
    changed_logits,
    changes_of_requests,
    changes_size,
    row_changes,
)
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel
from jax_specdec.requests import SamplingParams
from pallas_kernels.contract.changes import Changes, apply, prepared
from tests.support import quick_compile
from tests.support.changed_choice import changed_row
from tests.support.shards import mesh_of

INF, NAN = np.inf, np.nan
POISON = 7  # behind the known tokens and the drafts: counts for nothing


def written(prompts, emitted, drafts, length=12):
    """The arrays of slots with these tokens; what is behind them is poison."""
    tokens = np.full((len(prompts), length), POISON, np.int32)
    for row, *parts in zip(tokens, prompts, emitted, strict=True):
        known = [token for part in parts for token in part]
        row[: len(known)] = known
    lengths = [len(p) + len(e) for p, e in zip(prompts, emitted, strict=True)]
    return Written(jnp.asarray(tokens), jnp.int32(lengths), jnp.int32(drafts))


def made(params, prompts):
    return changes_of_requests(
        params, changes_size(params), [*map(len, prompts)], [0] * len(params)
    )


def changed(logits, params, prompts, emitted, drafts, parallel=ONE_DEVICE):
    changes = made(params, prompts)
    call = quick_compile.jit(partial(changed_logits, parallel=parallel))
    return np.asarray(call(jnp.asarray(logits), changes, written(prompts, emitted, drafts)))


def some(batch=6, vocabulary=40, drafts=3, dtype=np.float32, seed=0):
    """Random rows with -inf, NaN and equal logits, and slots of every kind."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-8, 8, (batch, drafts + 1, vocabulary)).astype(dtype) / 2
    logits[1, 2, :5], logits[2, 1, 9], logits[3, :, 3] = -INF, NAN, -INF
    every = SamplingParams(
        repetition_penalty=0.7, frequency_penalty=-0.3, presence_penalty=0.9, min_tokens=2,
        logit_bias={39: 9.5, 3: -100.0, 20: 0.0}, stop_token_ids=(0, 21, 39),
    )  # fmt: skip
    params = [every, SamplingParams(), SamplingParams(repetition_penalty=1.5), every,
              SamplingParams(logit_bias={n: n / 4 for n in range(20)}),
              SamplingParams(frequency_penalty=1.7)]  # fmt: skip
    draw = partial(rng.integers, 0, vocabulary)
    prompts = [draw(n + 1).tolist() for n in range(batch)]
    emitted = [draw(n % 3).tolist() for n in range(batch)]
    ids = draw((batch, drafts))
    ids[0], ids[5, 1:] = ids[0, 0], ids[5, 0]  # drafts that repeat themselves
    return logits, params, prompts, emitted, ids


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_every_slot_against_lists(dtype):
    logits, params, prompts, emitted, drafts = some(dtype=dtype)
    found = changed(logits, params, prompts, emitted, drafts)
    assert found.dtype == np.float32
    for slot, asks in enumerate(params):
        for row in range(logits.shape[1]):
            behind = [*emitted[slot], *drafts[slot, :row].tolist()]
            expected = changed_row(logits[slot, row], asks, prompts[slot], behind)
            np.testing.assert_allclose(found[slot, row], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found[1], logits[1].astype(np.float32))  # it asks for nothing


def test_rows_changes_are_those_of_the_copy():
    """Masks of every word, its highest bit too, and biases."""
    logits, _, prompts, emitted, drafts = some()
    held = {"min_tokens": 2, "stop_token_ids": (0, 31, 32, 39, 31)}
    biased = {"logit_bias": {39: 9.5, 0: -100.0}}
    each = held, biased, held | {"logit_bias": {31: 2.0}}, {}, {}, {}
    params = [SamplingParams(**one) for one in each]
    changes, tokens = made(params, prompts), written(prompts, emitted, drafts)
    copy = changed(logits, params, prompts, emitted, drafts)

    @quick_compile.jit
    def handed_down(logits, changes, lengths):
        rows = [x.reshape(24, -1) for x in row_changes(changes, lengths, 4, 40)]
        flat, ids = logits.reshape(24, 40), jnp.broadcast_to(jnp.arange(-1, 40), (24, 41))
        listed = RowChanges(*rows).at(jnp.pad(flat, ((0, 0), (1, 0)), constant_values=5), ids)
        return apply(flat, prepared(Changes(*rows), 40)), listed

    found, listed = handed_down(jnp.asarray(logits), changes, tokens.lengths)
    np.testing.assert_array_equal(found, copy.reshape(24, 40))
    np.testing.assert_array_equal(listed[:, 1:], found)
    np.testing.assert_array_equal(listed[:, 0], 5)  # -1 is no token
    assert np.isneginf(np.asarray(copy)[0, 0, [0, 31, 32, 39]]).all()
    assert row_changes(made(params[1:2], [[1]]), jnp.int32([1]), 4, 40).allowed is None


@pytest.mark.parametrize("length", [32767, 32768])
def test_counts_of_long_requests(length):
    """Each token is the same one: the narrow table's last count, and the first beyond it."""
    params = SamplingParams(frequency_penalty=1 / 64, presence_penalty=1.0)
    changes = made([params], [[]])
    tokens = Written(jnp.full((1, length), 3), jnp.int32([length]), jnp.zeros((1, 0), jnp.int32))
    found = quick_compile.jit(changed_logits)(jnp.zeros((1, 1, 4)), changes, tokens)
    np.testing.assert_array_equal(found[0, 0], [0, 0, 0, -length / 64 - 1])


def test_a_held_token_is_forbidden_whatever_its_logit():
    logits = np.full((1, 1, 4), NAN, np.float32)
    params = SamplingParams(min_tokens=1, stop_token_ids=(2, 3), logit_bias={2: 5.0})
    found = changed(logits, [params], [[0]], [[]], np.zeros((1, 0)))
    np.testing.assert_array_equal(found[0, 0], [NAN, NAN, -INF, -INF])


@pytest.mark.parametrize(("shards", "padding"), [(2, 0), (8, 4)])
def test_shards_give_the_bits_of_one_device(shards, padding):
    """Each device changes its own columns, and only these; padding stays as it is."""
    logits, params, prompts, emitted, drafts = some()
    whole = changed(logits, params, prompts, emitted, drafts)
    wide = logits[..., : 40 - padding]
    wide = np.concatenate([wide, np.full((*logits.shape[:2], padding), 55, np.float32)], axis=2)
    parallel = Parallel(mesh_of(shards), 40 - padding if padding else None)
    inside = [SamplingParams(**{**vars(one), "logit_bias": [pair for pair in one.logit_bias if
              pair[0] < 40 - padding]}) for one in params]  # fmt: skip
    found = changed(wide, inside, prompts, emitted, drafts, parallel)
    np.testing.assert_array_equal(found[..., : 40 - padding], whole[..., : 40 - padding])


def test_the_result_is_split_as_the_logits_are():
    logits, params, prompts, emitted, drafts = some()
    call = quick_compile.jit(partial(changed_logits, parallel=Parallel(mesh_of(4))))
    arguments = logits, made(params, prompts), written(prompts, emitted, drafts)
    compiled = call.lower(*arguments).compile()
    assert jax.tree.leaves(compiled.output_shardings)[0].spec[-1] == "model"
    text = compiled.as_text()
    assert "all-gather" not in text
    assert "all-reduce" not in text
