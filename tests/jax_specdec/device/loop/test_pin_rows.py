"""Rows, where no other test pins a line of docs/semantics.md: other batch shapes, sampled slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.sampling.distribution import Sampling
from jax_specdec.device.sampling.verify import Drafts, verify
from tests.support.decoding import mixed_requests, run

NEAR_TIE = 1e-4  # two largest logits closer than this may change places with the batch's shape


def compare(ids, others, margins):
    """Positions compared before the first near tie, and whether there was one.

    `margins` [n] are the differences of the two largest logits behind `ids`.
    """
    near = np.flatnonzero(np.asarray(margins) < NEAR_TIE)
    end = int(near[0]) if near.size else len(ids)
    assert ids[:end] == others[:end]
    return end, bool(near.size)


def margins(result, request_id):
    found = []
    for record in result.records[request_id]:
        rows = np.sort(result.outputs[record.step].logits[record.slot][: record.num_tokens], axis=1)
        found += (rows[:, -1] - rows[:, -2]).tolist()
    return found


def test_greedy_ids_across_batch_shapes_agree_up_to_a_near_tie(record_property):
    """[3, 4] steps with drafts against [1, 1] steps without, and other prefill chunks."""
    requests = mixed_requests(4, max_tokens=(16, 24))
    wide = run(requests, "ngram")
    narrow = run(requests, NoDrafter(0), num_slots=1, chunk=16)
    assert {output.logits.shape[:2] for output in wide.outputs} == {(3, 4)}
    assert {output.logits.shape[:2] for output in narrow.outputs} == {(1, 1)}
    found = [
        compare(wide.token_ids(r.id), narrow.token_ids(r.id), margins(wide, r.id)) for r in requests
    ]
    compared, near_ties = (sum(column) for column in zip(*found, strict=True))
    record_property("positions_compared", compared)
    record_property("near_ties", near_ties)
    print(f"{compared} positions compared, {near_ties} near ties met")
    assert compared > 40


@pytest.mark.fast
def test_that_comparison_can_fail():
    assert compare([1, 2, 3], [1, 2, 4], [1, 1, 5e-5]) == (2, True)
    assert compare([1, 2], [1, 2], [1, 1]) == (2, False)
    with pytest.raises(AssertionError):
        compare([1, 2, 3], [1, 2, 4], [1, 1, 2e-4])


VERIFY = jax.jit(verify)


@pytest.mark.fast
@pytest.mark.parametrize("bad", ["nan", "inf", "nothing"])
def test_a_sampled_slot_stops_at_an_invalid_row_with_its_greedy_token(bad):
    """Whatever the seed: an invalid row has no distribution to draw from."""
    count, vocab = 64, 5
    logits = np.full((count, 3, vocab), -np.inf, np.float32)
    logits[:, 0, 4] = logits[:, 2, 4] = 0  # only token 4 is possible
    logits[:, 1] = [-1, 2, 0, 2, 1]
    logits[:, 1] = {"nan": np.where(np.arange(vocab) == 4, np.nan, logits[:, 1]),
                    "inf": np.where(np.arange(vocab) == 1, np.inf, logits[:, 1]),
                    "nothing": -np.inf}[bad]  # fmt: skip
    greedy_id = 0 if bad == "nothing" else 1
    # Half of the drafts at the invalid row are its greedy id: they are not accepted either.
    drafts = np.full((count, 2), 4, np.int32)
    drafts[::2, 1] = greedy_id
    greedy_sampling = Sampling.greedy(count)
    got = VERIFY(
        jnp.asarray(logits),
        Drafts(jnp.asarray(drafts), jnp.full(count, 2, jnp.int32), None),
        greedy_sampling._replace(
            temperature=jnp.ones(count), seed=jnp.arange(count, dtype=jnp.uint32)
        ),
        jnp.zeros(count, jnp.int32),
    )
    assert (np.asarray(got.num_tokens) == 2).all()
    np.testing.assert_array_equal(got.token_ids, np.tile([4, greedy_id, -1], (count, 1)))
