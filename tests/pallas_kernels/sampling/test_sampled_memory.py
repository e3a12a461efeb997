"""Memory of a sampled step beside its logits, and what the loop's state keeps of drafts.

The search for the cut of a flat row is among the programs: it has one row in float32, not all.
"""

import jax
import jax.numpy as jnp
import pytest

from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages.batch_options import options_of_requests, widths_of
from jax_specdec.requests import SamplingParams
from pallas_kernels.backends.xla.rows import CPU_BYTES
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.row_read import emitted_logprobs
from pallas_kernels.sampling.types import Drafts
from pallas_kernels.sampling.verification import verify
from tests.support import quick_compile
from tests.support.decoding import draft_logits_kept, random_model

SHARE = 0.05  # of the logits' bytes


def temporaries(call, slots, vocab, dtype):
    """Bytes of a program that verifies three drafts of each slot."""
    shape = jax.ShapeDtypeStruct((slots, 4, vocab), dtype)
    drafts = jax.eval_shape(lambda: Drafts.none(slots, 3, vocab))
    sampling = jax.eval_shape(lambda: Sampling.greedy(slots))
    positions = jax.ShapeDtypeStruct((slots,), jnp.int32)
    lowered = jax.jit(call).lower(shape, drafts, sampling, positions)
    return lowered.compile(quick_compile.UNOPTIMIZED).memory_analysis().temp_size_in_bytes


def limit(slots, vocab, dtype):
    """Bytes: a share of the logits, and one block of rows with what is made of it."""
    return SHARE * slots * 4 * vocab * jnp.dtype(dtype).itemsize + CPU_BYTES


def with_raw(logits, *arguments):
    found = verify(logits, *arguments, k=20)
    return found[:2], emitted_logprobs(logits, found.token_ids, found.read)


@pytest.mark.slow
def test_temporaries_of_a_sampled_step():
    for case in ((64, 151_936, "bfloat16"), (64, 151_936, "float32"), (512, 32_000, "bfloat16")):
        assert temporaries(with_raw, *case) <= limit(*case)


def changed(logits, *arguments):
    shape = logits.shape[:2]
    bias_ids = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), (*shape, 16))
    bias = jnp.ones(bias_ids.shape, jnp.float32)
    words = jnp.full((*shape, -(-logits.shape[2] // 32)), -2, jnp.int32)
    return verify(
        logits, *arguments, axis_name=(), allowed=words, bias_token_ids=bias_ids, bias=bias
    )


@pytest.mark.slow
def test_changed_logits_are_no_copy():
    """Masks, a block of rows and its copy take less than a sixth of what a changed copy does."""
    slots, vocab = 64, 151_936
    assert temporaries(changed, slots, vocab, "bfloat16") <= slots * 4 * vocab * 4 / 6


def test_the_state_holds_no_draft_logits():
    """No array of it is as long as the vocabulary, after a step that tells of its drafts too."""
    vocab = 997  # no other size
    params, model = random_model(vocab)
    config = LoopConfig(model=model, drafter=MtpDrafter(model, 2), num_slots=2, max_length=32)
    asks = [SamplingParams(max_tokens=3, temperature=1.0, logprobs=5, draft_logprobs=True)] * 2
    widths = widths_of(asks, vocab)
    asked = options_of_requests(asks, widths)
    state = jax.eval_shape(lambda: init_state(config))

    def after():
        found = jax.eval_shape(
            lambda state: step(config, params, state, asked, report_widths=widths)[0], state
        )
        return [x.shape for x in jax.tree.leaves(found) if vocab in x.shape]

    assert [x.shape for x in jax.tree.leaves(state) if vocab in x.shape] == []
    assert after() == []
    with draft_logits_kept():  # the control
        assert after() == [(2, 2, vocab)]
