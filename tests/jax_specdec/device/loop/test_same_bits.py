"""A token's logprob has the same bits in any batch, chunk and step, and in the learner."""

import dataclasses
import functools
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.drafting import NgramDrafter, NoDrafter, SuffixDrafter
from jax_specdec.device.loop import programs
from jax_specdec.device.model import attention as attention_module
from jax_specdec.device.model import (
    digest_of,
    init_cache,
    llama,
    over_rows,
    sequence_logprobs,
    tiled_attention,
)
from jax_specdec.kept_sets import KeptSets
from jax_specdec.requests import LogprobsMode
from tests.support import decoding, quick_compile

T = 64


@pytest.fixture(autouse=True, scope="module")
def programs_are_those_of_users():
    """Without optimizations, XLA contracts a product and a sum here and not there."""
    with mock.patch.object(programs, "jax", SimpleNamespace(jit=quick_compile.as_users)):
        yield


@functools.cache
def tiny(tile=32, **changes):
    """Widths at which products of other numbers of rows do add in other orders."""
    sizes = {"hidden_size": 96, "num_heads": 6, "head_dim": 16, "intermediate_size": 200}
    params, config = decoding.random_model(scale=1.5, **sizes, **changes)
    return params, dataclasses.replace(config, row_tile=tile, row_step=8)


def requests(count=6, tokens=16, seed=0, scored=(LogprobsMode.RAW,)):
    """Raw, scaled and processed, greedy and sampled, of many lengths; some prompts are scored."""
    random = np.random.default_rng(seed)
    return [
        decoding.request(
            f"r{n}",
            random.integers(0, decoding.VOCAB, int(random.integers(2, 40))).tolist(),
            max_tokens=tokens,
            temperature=(0.0, 0.9, 1.3)[n % 3],
            top_p=(1.0, 0.8)[n // 3 % 2],
            seed=n,
            logprobs=(0, 5, 2)[n % 3],
            logprobs_mode=list(LogprobsMode)[n % 3],
            kept_token_ids=n % 3 == 2,
            prompt_logprobs=1 if list(LogprobsMode)[n % 3] in scored else None,
        )
        for n in range(count)
    ]


def started(item):
    """The request with its prompt's logprobs from the middle on, where it asks for any."""
    if item.params.prompt_logprobs is None:
        return item
    start = len(item.prompt_token_ids) // 2
    own = [[token_id] for token_id in item.prompt_token_ids[max(start, 1) :]]
    params = dataclasses.replace(
        item.params, prompt_logprobs_start=start, prompt_extra_token_ids=own
    )
    return dataclasses.replace(item, params=params)


BASE = {"drafting": NgramDrafter(3), "num_slots": 4, "chunk": 8}
ALONE = {"drafting": NoDrafter(0), "num_slots": 1, "chunk": 16, "prefix_reuse": False}


def values(records):
    """How many tokens a request has; ids, logprobs and top ids, its prompt's too, as bytes."""
    emitted = [record for record in records if record.num_tokens]
    prompt = [record.prompt for record in records if record.prompt]
    parts = [
        np.concatenate([np.asarray(getattr(one, name)) for one in some])
        for some in (emitted, prompt)
        for name in ("token_ids", "logprobs", "topk_ids")
        if some
    ]
    return len(parts[0]), *(part.tobytes() for part in parts)


def by_id(run):
    return {id: values(records) for id, records in run.records.items()}


@functools.cache
def base(**changes):
    return decoding.run(requests(), model=tiny(**changes), max_length=T, **BASE)


@pytest.mark.long
def test_no_batch_chunk_drafter_or_prefix_changes_a_bit():
    expected = by_id(base())
    assert sum(count for count, *_ in expected.values()) == 96
    assert by_id(decoding.run(requests(), model=tiny(), max_length=T, **ALONE)) == expected


@pytest.mark.long
@pytest.mark.parametrize("how", [BASE, ALONE], ids=["in company", "alone"])
def test_a_prompt_scored_in_part_has_the_same_bits(how):
    asked = requests(scored=tuple(LogprobsMode))
    every = decoding.run(asked, model=tiny(), max_length=T, **BASE).records
    run = decoding.run([*map(started, asked)], model=tiny(), max_length=T, **how).records
    for item in map(started, asked):
        some, whole = ([r.prompt for r in of[item.id] if r.prompt] for of in (run, every))
        assert some[0].start == item.first_scored
        for part in some:  # each row names its own token
            np.testing.assert_array_equal(part.chosen_logprobs[:, 0], part.logprobs[:, 0])
        for name in ("token_ids", "logprobs", "topk_ids", "token_ranks"):
            found, expected = (np.concatenate([getattr(p, name) for p in x]) for x in (some, whole))
            assert len(found) == len(item.prompt_token_ids) - item.first_scored
            np.testing.assert_array_equal(found, expected[item.first_scored - 1 :])


@pytest.mark.long
def test_a_preempted_request_has_the_bits_of_one_that_is_not():
    expected = by_id(base())
    for item in requests()[2:6:3]:
        local = decoding.Local(model=tiny(), max_length=T, **BASE)
        assert values(local.decode_evicted(item, [3, 9])) == expected[item.id]


def learner(run, asked, params, config, kept=True, length=T):
    """What the learner makes of a run's sequences, and what the records say: [tokens] each."""
    ids, t = np.zeros((len(asked), length), np.int32), np.zeros((len(asked), 1), np.float32)
    said, sets = np.full((len(asked), length), np.nan, np.float32), []
    for row, item in enumerate(asked):
        some = [record for record in run.records[item.id] if record.num_tokens]
        own = [*item.prompt_token_ids, *decoding.tokens_of(some)]
        start = len(item.prompt_token_ids)
        ids[row, : len(own)], t[row] = own, item.params.temperature
        if item.params.logprobs_mode is LogprobsMode.RAW:
            t[row] = 1
        said[row, start : len(own)] = np.concatenate([r.logprobs[:, 0] for r in some])
        if item.params.prompt_logprobs is not None and not kept:
            parts = [r.prompt.logprobs[:, 0] for r in run.records[item.id] if r.prompt]
            said[row, 1:start] = np.concatenate(parts)
        if kept:
            there = KeptSets.joined([record.kept for record in some])
            places = np.full(length, -1)
            places[start : len(own)] = np.arange(len(there))
            sets.append(there.padded(places[1:], width=decoding.VOCAB))
    more = tuple(map(np.stack, zip(*sets, strict=True))) if kept else None
    digests = {record.digest for records in run.records.values() for record in records}
    (digest,) = digests - {0}  # 0: a record without rows
    found = scored(params, config, ids, t, more, digest=digest)
    there = ~np.isnan(said[:, 1:])
    return np.asarray(found)[there], said[:, 1:][there]


scored = quick_compile.as_users(
    sequence_logprobs, static_argnums=1, static_argnames=("digest", "on_other_digest")
)


@pytest.mark.long
@pytest.mark.parametrize("kept", [False, True], ids=["raw and scaled", "processed"])
def test_the_learner_has_the_bits_of_the_rollout(kept):
    params, config = tiny()
    asked = [one for one in requests() if one.params.kept_token_ids == kept]
    found, said = learner(base(), asked, params, config, kept)
    prompts = 0 if kept else sum(len(one.prompt_token_ids) - 1 for one in asked[::2])
    assert len(said) == 16 * len(asked) + prompts
    np.testing.assert_array_equal(found, said)
    np.testing.assert_array_equal(np.exp(found - said), 1)


def test_a_product_outside_of_the_tiles_would_be_noticed():
    """The negative control: what stands behind attention, over all rows at once."""
    asked = [one for one in requests() if not one.params.kept_token_ids]

    def leaky(function, *rows, **more):
        if function.__name__ == "behind":
            return function(*rows)
        return over_rows(function, *rows, **more)

    with mock.patch.object(llama, "over_rows", leaky):
        scored.clear_cache()
        found, said = learner(base(), asked, *tiny(), kept=False)
    scored.clear_cache()
    assert (np.exp(found - said) != 1).any()
    np.testing.assert_allclose(found, said, atol=1e-4)


def test_a_row_of_experts_has_the_same_bits_beside_any_others():
    params, config = tiny(num_experts=4, experts_per_token=2)
    layer = jax.tree.map(lambda x: x[0], params.layers)
    rows = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)

    @quick_compile.as_users
    def of(x):
        def attend(q, k, v):
            return q.reshape(x.shape), None

        places = jnp.zeros(x.shape[:2], jnp.int32)
        return llama.decoder_layer(layer, config, x, places, attend)[0]

    every = np.asarray(of(rows[None]))[0]
    for count in (1, 8, 20):
        np.testing.assert_array_equal(np.asarray(of(rows[None, :count]))[0], every[:count])


def test_gradients_are_those_without_tiles():
    params, config = tiny()
    random = np.random.default_rng(0)
    ids = random.integers(0, decoding.VOCAB, (3, 20)).astype(np.int32)
    weights = random.normal(size=(3, 19)).astype(np.float32)

    def plain(params, t):
        """By `llama.forward`, and by JAX."""
        places = jnp.broadcast_to(jnp.arange(19, dtype=jnp.int32), (3, 19))
        own = dataclasses.replace(config, row_tile=None)
        hidden, _ = llama.forward(
            params, own, jnp.asarray(ids[:, :-1]), places, init_cache(own, 3, 19)
        )
        rows = jax.nn.log_softmax(llama.logits(params, own, hidden) / t)
        return jnp.sum(weights * jnp.take_along_axis(rows, ids[:, 1:, None], axis=2)[..., 0])

    def tiled(params, t):
        return jnp.sum(weights * sequence_logprobs(params, config, ids, t))

    both = [
        quick_compile.jit(jax.value_and_grad(one, argnums=(0, 1)))(params, jnp.float32(0.8))
        for one in (plain, tiled)
    ]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-3), *both)


def test_attention_in_tiles_has_the_gradient_of_attention():
    random = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(random.normal(size=(2, n, h, 8)), jnp.float32)
        for n, h in ((5, 4), (300, 2), (300, 2))
    )
    last = jnp.asarray(random.integers(0, 300, (2, 5)), jnp.int32)
    first = jnp.maximum(last - 270, 0)
    index = jnp.arange(300)[None, None]
    visible = (index >= first[..., None]) & (index <= last[..., None])
    plain = attention_module.Scoring(None, 2.0)
    functions = (
        lambda *x: tiled_attention(*x, first, last, soft_cap=2.0),
        lambda *x: attention_module.attention(*x, visible, plain),
    )
    made = [quick_compile.jit(lambda *x, f=f: jax.vjp(f, *x)[1](f(*x)))(q, k, v) for f in functions]
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *made)


def test_a_rollout_of_another_digest_is_refused():
    params, config = tiny()
    ids, own = np.zeros((1, 4), np.int32), digest_of(config)
    changes = {"row_tile": 16}, {"dtype": "float16"}
    others = [dataclasses.replace(config, **change) for change in changes]
    assert len({own, *map(digest_of, others), digest_of(config, implementation="xla")}) == 4
    assert own == digest_of(dataclasses.replace(config, num_layers=1))
    with pytest.raises(ValueError, match=f"the rollout has the digest 7, and this process {own}"):
        jax.eval_shape(lambda: sequence_logprobs(params, config, ids, digest=7))
    with pytest.warns(UserWarning, match="near 1 and not 1"):
        jax.eval_shape(
            lambda: sequence_logprobs(params, config, ids, digest=7, on_other_digest="warn")
        )
    with pytest.raises(ValueError, match="row_tile = None"):
        sequence_logprobs(params, dataclasses.replace(config, row_tile=None), ids)


def test_a_row_of_other_logits_has_no_logprob_under_jit():
    params, config = tiny()
    ids = np.random.default_rng(0).integers(0, decoding.VOCAB, (2, 5)).astype(np.int32)
    run = quick_compile.as_users(sequence_logprobs, static_argnums=1)
    words = np.zeros((2, 4, 2), np.uint32)  # 0: not compared
    alone = run(params, config, ids, row_digests=words)
    np.testing.assert_array_equal(alone, scored(params, config, ids))
    words[1, 2] = 3, 3  # of float32 logits, and of no row here
    found = np.asarray(run(params, config, ids, row_digests=words))
    np.testing.assert_array_equal(np.argwhere(np.isnan(found)), [[1, 2]])
    with pytest.raises(ValueError, match=r"give uint64 \(2, 4\)"):
        jax.eval_shape(lambda: sequence_logprobs(params, config, ids, row_digests=words[:1]))


def test_a_digest_of_each_token_is_compared_too():
    params, config = tiny()
    ids, own = np.zeros((1, 4), np.int32), digest_of(config)
    digests = np.full(5, own, np.uint16)
    jax.eval_shape(lambda: sequence_logprobs(params, config, ids, digest=digests))
    digests[3] = 7
    with pytest.raises(ValueError, match="the rollout has the digest 7,"):
        jax.eval_shape(lambda: sequence_logprobs(params, config, ids, digest=digests))
    with pytest.raises(TypeError, match="digest = '7' must be an integer"):
        jax.eval_shape(lambda: sequence_logprobs(params, config, ids, digest="7"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 20, "sliding_layers": (1,), "qkv_bias": True, "qk_norm": True},
        {"num_experts": 4, "experts_per_token": 2},
    ],
    ids=["plain", "a sliding layer, biases, normed heads", "experts"],
)
def test_the_same_bits_in_a_wide_matrix(dtype, changes):
    """2,160 tokens in each batch, and 48 sequences of 200 in the learner."""
    model, more = tiny(dtype=dtype, **changes), {"max_length": 256}  # whole tiles of keys
    asked = requests(36, tokens=60, scored=LogprobsMode)
    first = decoding.run(asked, NgramDrafter(3), num_slots=8, chunk=64, model=model, **more)
    expected, greedy = by_id(first), [one for one in asked if not one.params.temperature]
    assert sum(count for count, *_ in expected.values()) == 2160
    assert first.state.statistics.num_accepted > 100
    for drafting, slots, chunk, some in (
        (NoDrafter(0), 4, 16, asked),
        (SuffixDrafter(2), 1, 32, asked),
        ("mtp", 4, 16, greedy),
    ):
        run = decoding.run(some, drafting, num_slots=slots, chunk=chunk, model=model, **more)
        assert by_id(run) == {one.id: expected[one.id] for one in some}
    for kept in (False, True):
        many = requests(48, tokens=200, seed=1)
        longer = [one for one in many if one.params.kept_token_ids == kept]
        run = decoding.run(longer, NgramDrafter(3), num_slots=8, chunk=64, model=model, **more)
        found, said = learner(run, longer, *model, kept, length=256)
        assert len(said) >= 200 * len(longer)
        np.testing.assert_array_equal(np.exp(found - said), 1)
