"""How long a verification's program is: what every user waits for before the first step."""

import jax
import pytest

from pallas_kernels.sampling import CompactQ, Drafts, Sampling, verify
from tests.support import quick_compile

pytestmark = pytest.mark.slow

# Slots, vocabulary, tokens of q, and the most instructions of optimized HLO: a few percent above
# what there is. A count depends on no clock.
CASES = [(4, 32_000, 8, 11_000), (64, 151_936, None, 11_650)]


def instructions(call, slots, vocabulary, q):
    """How many instructions XLA makes of a verification of four drafts."""

    def array(shape, dtype="int32"):
        return jax.ShapeDtypeStruct((slots, *shape), dtype)

    ratios = None if q is None else CompactQ(array((4, q)), array((4, q), "float32"))
    drafts = Drafts(array((4,)), array(()), ratios)
    floats, integers = array((), "float32"), array(())
    sampling = Sampling(floats, integers, floats, floats, array((), "uint32"))
    logits = array((5, vocabulary), "float32")
    lowered = jax.jit(call).lower(logits, drafts, sampling, integers)
    text = lowered.compile(quick_compile.UNOPTIMIZED).as_text()
    return sum(" = " in line for line in text.splitlines())


@pytest.mark.parametrize(("slots", "vocabulary", "q", "most"), CASES)
def test_a_verification_is_no_longer_than_it_was(slots, vocabulary, q, most):
    assert instructions(verify, slots, vocabulary, q) <= most


def test_what_is_in_the_program_twice_would_be_seen():
    """A negative control: a second verification of the same logits, at another temperature."""

    def twice(logits, drafts, sampling, positions):
        warmer = sampling._replace(temperature=sampling.temperature * 2)
        return [verify(logits, drafts, one, positions) for one in (sampling, warmer)]

    slots, vocabulary, q, most = CASES[0]
    assert instructions(twice, slots, vocabulary, q) > most
