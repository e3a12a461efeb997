"""Verification, messages and a whole step over several devices: values, and collectives."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc import wire
from ipc.wire import KEPT_ALL, LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig, init_state, state_specs
from jax_specdec.device.messages.batch_options import Widths, options_of_requests, widths_of
from jax_specdec.device.messages.step_messages import step_output, target_message
from jax_specdec.device.model import sharding
from jax_specdec.device.model.llama import logits
from jax_specdec.device.model.params import init_params
from jax_specdec.records.decode import decode
from jax_specdec.requests import SamplingParams
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.sampling.drafts import draw
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.types import Drafts
from pallas_kernels.sampling.verification import verify
from tests.support import quick_compile
from tests.support.collectives import collectives
from tests.support.shards import P, mesh_of

VOCAB = 32_768  # a shard has more columns than a row has candidates
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8,
    intermediate_size=64, num_mtp_layers=1,
)  # fmt: skip
SLOTS, DRAFTS, LENGTH = 3, 2, 64
COLUMNS = 2208  # of random rows of logits: no number of shards holds whole groups of 256


@functools.cache
def rows():
    """Target logits [B, S, V] and drafts with logits; greedy, cut and plain slots."""
    rng, batch = np.random.default_rng(0), 24
    target = rng.normal(0, 3, (batch, DRAFTS + 1, COLUMNS)).astype(np.float32)
    target[3, 1, 5], target[4, 0] = np.nan, -np.inf
    draft = (target[:, :DRAFTS] + rng.normal(0, 0.3, (batch, DRAFTS, COLUMNS))).astype(np.float32)
    sampling = Sampling(
        temperature=jnp.asarray(np.resize(np.float32([0, 1, 0.4, 0.9]), batch)),
        top_k=jnp.asarray(np.resize(np.int32([0, 40, 0]), batch)),
        top_p=jnp.asarray(np.resize(np.float32([0.9, 1, 0.8, 1, 1]), batch)),
        min_p=jnp.asarray(np.resize(np.float32([0, 0, 0, 0.02]), batch)),
        seed=jnp.arange(batch, dtype=jnp.uint32),
    )
    positions, draws = jnp.full(batch, 7, jnp.int32), quick_compile.jit(draw)
    drafts = Drafts.joined(
        [draws(jnp.asarray(draft[:, d : d + 1]), sampling, positions + d) for d in range(DRAFTS)],
        jnp.asarray(rng.integers(0, DRAFTS + 1, batch).astype(np.int32)),
    )
    return jnp.asarray(target), drafts, sampling, positions


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "with_q"), [(2, True), (4, False), (8, True)])
def test_verification_on_shards_emits_what_one_device_emits(shards, with_q):
    """Tokens and cuts bit for bit, with random numbers of every purpose; messages that say so.

    Processed logprobs are of the cut that was found; kept sets travel in 4 KB a row at most.
    """
    target, drafts, sampling, positions = rows()
    drafts = drafts if with_q else drafts._replace(q=None)
    asks = [
        SamplingParams(
            logprobs=5, logprobs_mode=LogprobsMode.PROCESSED, extra_token_ids=(7, COLUMNS - 1),
            kept_token_ids=True, **dict(zip(sampling._fields, one, strict=True)),
        )
        for one in zip(*(x.tolist() for x in sampling), strict=True)
    ]  # fmt: skip
    widths, number = widths_of(asks, COLUMNS), jnp.zeros(2, jnp.uint32)
    asked = options_of_requests(asks, widths)

    def found_on(count):
        parallel = sharding.ONE_DEVICE if count == 1 else sharding.Parallel(mesh_of(count))
        run = quick_compile.jit(functools.partial(verify, **parallel.columns))
        found = run(target, drafts, sampling, positions)
        output = step_output(target, drafts, found, active=positions > 0, running=jnp.bool_(True))
        message = quick_compile.jit(
            functools.partial(target_message, widths=widths, parallel=parallel)
        ).lower(output, asked, number).compile()  # fmt: skip
        words = np.asarray(message(output, asked, number))
        sent = decode(words[: words[wire.HEADER["num_words"].word]].tobytes())
        return found, sent, collectives(message)

    (whole, one, _), (split, many, traffic) = found_on(1), found_on(shards)
    assert len(set(np.asarray(whole.num_tokens).tolist())) > 1
    jax.tree.map(np.testing.assert_array_equal, split, whole)
    assert np.isneginf(one.logprobs).any()  # excluded tokens
    np.testing.assert_allclose(many.logprobs, one.logprobs, rtol=0, atol=1e-5)
    for name in ("token_ids", "token_ranks", "topk_ids"):
        np.testing.assert_array_equal(getattr(many, name), getattr(one, name))
    for name in ("counts", "log_kept", "token_ids"):
        np.testing.assert_array_equal(getattr(many.kept_sets, name), getattr(one.kept_sets, name))
    assert {KEPT_ALL, 1} < set(one.kept_sets.counts.tolist())
    assert len(set(one.kept_sets.counts.tolist())) > 10
    num_rows = target.shape[0] * target.shape[1]
    assert max(c.num_bytes for c in traffic) <= 4 * num_rows * min(wire.MAX_KEPT, COLUMNS)


# Collectives of a step -------------------------------------------------------------------------


def placed(parallel, shapes, specs):
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        parallel.shardings(specs(shapes, parallel.num_shards)),
    )


def longest_axis(program):
    """Of what the collectives of a program carry."""
    shapes = [dims for one in collectives(program) for _, dims in one.shapes]
    return max((max(dims, default=1) for dims in shapes), default=0)


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_no_collective_of_a_step_has_the_vocabularys_size(shards):
    """Nor of its two messages, for a batch that asks for everything."""
    parallel = sharding.tensor_parallel(CONFIG, shards)
    drafter = MtpDrafter(CONFIG, DRAFTS, parallel)
    config = LoopConfig(CONFIG, drafter, SLOTS, LENGTH, parallel=parallel)
    widths = Widths(k=5, chosen=16, mode=LogprobsMode.PROCESSED)
    processed = SamplingParams(
        max_tokens=20, temperature=0.8, top_k=50, top_p=0.9, logprobs=3, draft_logprobs=True,
        logprobs_mode=LogprobsMode.PROCESSED, extra_token_ids=(7, VOCAB - 1),
    )  # fmt: skip
    asks = [SamplingParams(max_tokens=20, logprobs=5), SamplingParams(max_tokens=20), processed]
    slots = [host_slots.Slot(params=one, most_tokens=3) for one in asks]
    asked = host_slots.options_of_slots(slots, widths)
    functions, number = Compiled(config), np.zeros(2, np.uint32)
    weights = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    whole = jax.eval_shape(lambda: init_state(replace(config, parallel=sharding.ONE_DEVICE)))
    model = placed(parallel, weights, sharding.params_specs), placed(parallel, whole, state_specs)

    def compiled(traced):
        return traced.lower().compile(compiler_options=quick_compile.OPTIONS)

    traced = functions.step.trace(*model, asked, report_widths=widths)
    step = compiled(traced)
    output = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        traced.out_info[1],
        step.output_shardings[1],
    )
    messages = functions.target_message, functions.draft_message
    told = (output, asked, number, np.bool_(True)), (output, asked, number)
    target, draft = (
        longest_axis(compiled(message.trace(*arguments, widths=widths)))
        for message, arguments in zip(messages, told, strict=True)
    )
    assert 0 < longest_axis(step) < VOCAB // shards
    assert 0 < target < VOCAB // shards
    assert draft == 0  # what it says was made as the drafts were drawn


@pytest.mark.slow
def test_gathered_logits_would_be_seen():
    """Negative control: each of two devices gets all logits."""
    parallel = sharding.tensor_parallel(CONFIG, 2)
    everywhere = jax.sharding.NamedSharding(parallel.mesh, P())

    def gathered(params, hidden):
        return jax.lax.with_sharding_constraint(logits(params, CONFIG, hidden), everywhere)

    weights = jax.eval_shape(lambda: init_params(CONFIG, jax.random.key(0)))
    hidden = jax.ShapeDtypeStruct((SLOTS, CONFIG.hidden_size), jnp.float32, sharding=everywhere)
    model = placed(parallel, weights, sharding.params_specs)
    # XLA gathers the weights that make them, which is cheaper here: they are of V's size too.
    assert longest_axis(jax.jit(gathered).lower(model, hidden).compile()) >= VOCAB // 2


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="vocabulary of 32768 tokens does not divide among 3"):
        sharding.tensor_parallel(CONFIG, 3)
    with pytest.raises(ValueError, match="over 9 devices, but JAX has 8"):
        sharding.tensor_parallel(CONFIG, 9)
    one = sharding.ONE_DEVICE
    assert sharding.tensor_parallel(CONFIG, 1) == one
    assert one.over_vocabulary(lambda *x: x, 3, None) == (VocabShard(), 3, None)
