"""A user's own function as a drafter: its proposals, and the results that are refused."""

import doctest

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.drafting import from_function
from jax_specdec.device.drafting.from_function import CallableDrafter
from pallas_kernels.sampling.types import Drafts
from tests.support.decoding import VOCAB
from tests.support.draft_contexts import context


class Proposing(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_limit_and_vocabulary_cut_what_is_proposed(self):
        def proposes(params, context):
            ids = jnp.array([[4, 5, 6], [4, 5, 6], [4, VOCAB, 6], [-1, 5, 6], [4, 5, 6]])
            return Drafts(ids, jnp.array([3, 3, 3, 3, -2]))

        drafter = CallableDrafter(proposes, 3, VOCAB)
        seen = context([[1]] * 5, limit=[3, 1, 3, 3, 3])
        drafts, _ = self.variant(lambda c: drafter.propose(None, (), c))(seen)
        np.testing.assert_array_equal(drafts.num, [3, 1, 1, 0, 0])
        np.testing.assert_array_equal(
            drafts.token_ids, [[4, 5, 6], [4, 0, 0], [4, 0, 0], [0, 0, 0], [0, 0, 0]]
        )


def test_the_documented_example_runs():
    found = doctest.testmod(from_function)
    assert (found.attempted, found.failed) == (2, 0)
    scope = {}
    for example in doctest.DocTestFinder().find(CallableDrafter, globs=vars(from_function)):
        doctest.DocTestRunner().run(example, clear_globs=False)
        scope |= example.globs
    drafts, _ = scope["drafter"].propose(None, (), context([[1, 7], [2]], limit=[2, 1]))
    np.testing.assert_array_equal(drafts.token_ids, [[7, 7], [2, 0]])


def returning(**fields):
    good = {"token_ids": jnp.zeros((4, 2), jnp.int32), "num": jnp.zeros(4, jnp.int32),
            "q": None}  # fmt: skip

    def mine(params, context):
        return Drafts(**good | fields)

    return mine


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": jnp.zeros((4, 3), jnp.int32)},
         r"mine returned token_ids = int32\[4, 3\]; expected int32\[4, 2\] \(B = 4, D = 2"),
        ({"token_ids": jnp.zeros((4, 2))}, r"token_ids = float32\[4, 2\]; expected int32"),
        ({"num": jnp.zeros((4, 1), jnp.int32)}, r"num = int32\[4, 1\]; expected int32\[4\]"),
        ({"num": 2}, r"num = int32\[\]; expected int32\[4\]"),
        ({"q": Drafts.none(4, 2, VOCAB).q},
         r"q = int32\[4, 2, 32\], float32\[4, 2, 32\]; expected None"),
    ],
)  # fmt: skip
def test_wrong_shapes_and_types_are_named_while_tracing(fields, message):
    drafter = CallableDrafter(returning(**fields), 2, VOCAB)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda c: drafter.propose(None, (), c), context([[1]] * 4))


def test_a_promised_q_must_come_and_what_its_message_tells():
    drafter = CallableDrafter(returning(), 2, VOCAB, drawn=True)
    q = drafter.init(4, 8)[0].q
    assert q.ids.shape == (4, 2, VOCAB)
    with pytest.raises(ValueError, match=r"q = None; expected .*: `drafting.draw` makes it"):
        drafter.propose(None, (), context([[1]] * 4))
    silent = CallableDrafter(returning(q=q), 2, VOCAB, drawn=True)
    silent.propose(None, (), context([[1]] * 4))
    asked = context([[1]] * 4)._replace(report_drafts=lambda *_: None)
    with pytest.raises(
        ValueError, match=r"report = None, but .* the argument report_drafts=context.report_drafts"
    ):
        silent.propose(None, (), asked)


def test_what_is_no_function_of_that_kind_is_refused():
    with pytest.raises(TypeError, match="returned a tuple; expected a"):
        CallableDrafter(lambda p, c: (1, 2), 2, VOCAB).propose(None, (), context([[1]]))
    with pytest.raises(TypeError, match="None is not a function"):
        CallableDrafter(None, 2, VOCAB)
    with pytest.raises(ValueError, match="num_drafts = 0 must be positive"):
        CallableDrafter(returning(), 0, VOCAB)
    with pytest.raises(ValueError, match="vocab_size = 0"):
        CallableDrafter(returning(), 2, 0)


def test_it_is_a_static_value():
    mine, other = returning(), returning()
    one, same = CallableDrafter(mine, 3, VOCAB), CallableDrafter(mine, 3, VOCAB)
    assert (one, hash(one)) == (same, hash(same))
    assert CallableDrafter(other, 3, VOCAB) != one
