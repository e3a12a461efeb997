"""How long a verification's program is: what every user waits for before the first step."""

import re

import jax
import pytest

from pallas_kernels.sampling import CompactQ, DenseQ, Drafts, Sampling, verify
from tests.support import quick_compile

pytestmark = pytest.mark.slow

# Slots, vocabulary, tokens of q, and the most instructions of optimized HLO: a few percent above
# what there is. A count depends on no clock.
CASES = [(4, 32_000, 8, 9_600), (64, 151_936, None, 10_150)]


def array(slots, shape, dtype="int32"):
    return jax.ShapeDtypeStruct((slots, *shape), dtype)


def optimized(call, slots, vocabulary, q, dtype, options=None):
    """The optimized HLO of a verification of four drafts, and their sampling."""
    drafts = Drafts(array(slots, (4,)), array(slots, ()), q)
    floats, integers = array(slots, (), "float32"), array(slots, ())
    sampling = Sampling(floats, integers, floats, floats, array(slots, (), "uint32"))
    logits = array(slots, (5, vocabulary), dtype)
    return jax.jit(call).lower(logits, drafts, sampling, integers).compile(options).as_text()


def instructions(call, slots, vocabulary, q):
    """How many instructions XLA makes of a verification."""
    tokens = None
    if q is not None:
        tokens = CompactQ(array(slots, (4, q)), array(slots, (4, q), "float32"))
    text = optimized(call, slots, vocabulary, tokens, "float32", quick_compile.UNOPTIMIZED)
    return sum(" = " in line for line in text.splitlines())


def widened(call):
    """The kernels that write all logits, or all of q, as float32."""
    slots, vocabulary = 13, 151_936
    text = optimized(
        call, slots, vocabulary, DenseQ(array(slots, (4, vocabulary), "bfloat16")), "bfloat16"
    )
    every = rf"= f32\[(65|52|13,5|13,4),{vocabulary}\]\S* (fusion|convert|copy)\("
    fused = re.compile(r"^%?fused_computation.*?^}", re.DOTALL | re.MULTILINE)
    return re.findall(every, fused.sub("", text))


@pytest.mark.parametrize(("slots", "vocabulary", "q", "most"), CASES)
def test_a_verification_is_no_longer_than_it_was(slots, vocabulary, q, most):
    assert instructions(verify, slots, vocabulary, q) <= most


def test_a_verification_of_bfloat16_makes_no_float32_copy():
    """XLA's CPU compiler takes the widening of what a loop slices out of the loop."""
    assert not widened(verify)
