"""Verification, messages and a whole step over several devices: values, and collectives."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig, init_state, state_specs
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.device.model import sharding
from jax_specdec.device.model.params import init_params
from jax_specdec.requests import SamplingParams
from pallas_kernels.meshes.placement import VocabShard
from tests.support import quick_compile
from tests.support.collectives import collectives

VOCAB = 32_768  # a shard has more columns than a row has candidates
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8,
    intermediate_size=64, num_mtp_layers=1,
)  # fmt: skip
SLOTS, DRAFTS, LENGTH = 3, 2, 64


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


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="vocabulary of 32768 tokens does not divide among 3"):
        sharding.tensor_parallel(CONFIG, 3)
    with pytest.raises(ValueError, match="over 9 devices, but JAX has 8"):
        sharding.tensor_parallel(CONFIG, 9)
    one = sharding.ONE_DEVICE
    assert sharding.tensor_parallel(CONFIG, 1) == one
    assert one.over_vocabulary(lambda *x: x, 3, None) == (VocabShard(), 3, None)
