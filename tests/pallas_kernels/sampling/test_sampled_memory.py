"""What a verification costs: its temporaries, the state's drafts, the length of its program.

The search for the cut of a flat row is among the programs: it has one row in float32, not all.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_specdec.device.drafting.drafters import MtpDrafter
from jax_specdec.device.loop.state import LoopConfig, init_state
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages.batch_options import options_of_requests, widths_of
from jax_specdec.requests import SamplingParams
from pallas_kernels.backends.xla.block_rows import CPU_BYTES
from pallas_kernels.sampling import CompactQ, Drafts, Sampling, logprobs_of_read, verify
from tests.support import quick_compile
from tests.support.decoding import draft_logits_kept, random_model
from tests.support.lowered import array, temporaries
from tests.support.paths import ROOT


def needed(call, slots, vocab, dtype):
    """Bytes of a program that verifies three drafts of each slot."""
    drafts = jax.eval_shape(lambda: Drafts.none(slots, 3, vocab))
    sampling = jax.eval_shape(lambda: Sampling.greedy(slots))
    return temporaries(call, array((slots, 4, vocab), dtype), drafts, sampling, array((slots,)))


def with_raw(logits, *arguments):
    found = verify(logits, *arguments, k=20)
    return found[:2], logprobs_of_read(logits, found.token_ids, found.read)


@pytest.mark.slow
def test_temporaries_of_a_sampled_step():
    """A share of the logits' bytes, candidates, and one block of rows with what is made of it."""
    for case in ((64, 151_936, "bfloat16"), (64, 151_936, "float32"), (512, 32_000, "bfloat16")):
        logits = case[0] * 4 * case[1] * jnp.dtype(case[2]).itemsize
        assert needed(with_raw, *case) <= 0.05 * logits + 3072 * case[0] + CPU_BYTES


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
    assert needed(changed, slots, vocab, "bfloat16") <= slots * 4 * vocab * 4 / 6


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


# Slots, vocabulary, tokens of q, and the most instructions of optimized HLO: a few percent above
# what there is. A count depends on no clock.
CASES = [(4, 32_000, 8, 9_600), (64, 151_936, None, 10_150)]


def optimized(slots, vocabulary, q, dtype, options=None):
    """The optimized HLO of a verification of four drafts, and their sampling."""
    drafts = Drafts(array((slots, 4)), array((slots,)), q)
    floats, integers = array((slots,), "float32"), array((slots,))
    sampling = Sampling(floats, integers, floats, floats, array((slots,), "uint32"))
    logits = array((slots, 5, vocabulary), dtype)
    return jax.jit(verify).lower(logits, drafts, sampling, integers).compile(options).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "vocabulary", "q", "most"), CASES)
def test_a_verification_is_no_longer_than_it_was(slots, vocabulary, q, most):
    tokens = q and CompactQ(array((slots, 4, q)), array((slots, 4, q), "float32"))
    text = optimized(slots, vocabulary, tokens, "float32", quick_compile.UNOPTIMIZED)
    assert sum(" = " in line for line in text.splitlines()) <= most  # instructions of XLA


@pytest.mark.slow
def test_a_verification_of_bfloat16_makes_no_float32_copy():
    """No kernel writes all logits as float32.

    XLA's CPU compiler takes the widening of what a loop slices out of the loop.
    """
    slots, vocabulary = 13, 151_936
    q = CompactQ(array((slots, 4, 64)), array((slots, 4, 64), "float32"))
    text = optimized(slots, vocabulary, q, "bfloat16")
    fused = re.compile(r"^%?fused_computation.*?^}", re.DOTALL | re.MULTILINE)
    widened = rf"= f32\[(65|13,5),{vocabulary}\]\S* (fusion|convert|copy)\("
    assert not re.findall(widened, fused.sub("", text))


COMPILED = """
import jax, sys
from jax_specdec.device import Drafts, Sampling, verify
from jax_specdec.device.drafting import CompactQ

def of(*shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, dtype)

for text in sys.argv[1:]:
    b, s, m, v = map(int, text.split(","))
    q = CompactQ(of(b, s - 1, m), of(b, s - 1, m, dtype="float32"))
    sampling = jax.eval_shape(lambda: Sampling.greedy(b))
    given = of(b, s, v, dtype="float32"), Drafts(of(b, s - 1), of(b), q), sampling, of(b)
    jax.jit(verify).lower(*given).compile()
"""
EVERY_SIZE = [f"{1 + m % 4},{2 + m % 3},{m},{(7, 1032)[m // 2 % 2]}" for m in range(1, 10)]


@pytest.mark.long
@pytest.mark.parametrize("shapes", [["1,3,8,7"], pytest.param(EVERY_SIZE, marks=pytest.mark.slow)])
def test_no_shape_aborts_the_compiler(shapes):
    """LLVM of jaxlib 0.10.2 did at one, with a user's flags, while computed rows were padded."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", COMPILED, *shapes]
    assert subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == 0
