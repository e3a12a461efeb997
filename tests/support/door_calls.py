"""A call of every function of both doors of the kernels, of arrays that are on the device."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from pallas_kernels import sampling

V, H = 300, 8  # more than one group of 256 tokens


def door_calls():
    """A function without arguments for each name; its results are finite numbers and ids.

    A name is that of the door, or begins with it and says how it is called.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(scale=3, size=(6, V)), jnp.float32)
    by_slot = x.reshape(2, 3, V)
    ids = jnp.asarray(rng.integers(0, V, 6), jnp.int32)
    column, by_position = ids[:, None], ids.reshape(2, 3)
    ones, all_rows = jnp.ones((6, 1), jnp.float32), jnp.arange(6, dtype=jnp.int32)
    allowed = jnp.full((6, -(-V // 32)), -1, jnp.int32)
    temperatures = jnp.full(6, 0.8, jnp.float32)
    hidden, head = (jnp.asarray(rng.normal(size=(n, H)), jnp.float32) for n in (6, V))
    slots = sampling.Sampling.of(
        2,
        temperature=np.array([0.8, 1.0]),
        top_k=np.array([50, 0]),
        top_p=np.array([0.9, 1.0]),
        seed=np.array([1, 2]),
    )
    key = jax.random.key(0)
    rows = sampling.Sampling.of(6, temperature=0.8, top_p=0.9)
    greedy = sampling.Sampling.greedy(2)
    positions, next_positions = jnp.array([3, 4], jnp.int32), jnp.array([4, 5], jnp.int32)
    first, second = by_slot[:, :1], by_slot[:, 1:2]
    num, lengths = jnp.array([2, 1], jnp.int32), jnp.array([3, 3], jnp.int32)
    certain = sampling.Drafts(ids[:4].reshape(2, 2), num)
    parts = [
        sampling.draw(first, slots, positions),
        sampling.draw(second, slots, next_positions),
    ]
    drawn = sampling.Drafts.joined(parts, num)
    row_ids = sampling.row_ids_of(lengths, 3)
    log_q = jax.nn.log_softmax(by_slot[:, :2])
    dense = certain._replace(q=sampling.DenseQ(log_q))
    of_logits = certain._replace(q=sampling.DenseQ.of_logits(by_slot[:, :2], 0.9))
    cut = sampling.truncation(x, rows)
    kept = sampling.kept_sets(x, all_rows, 6, cut)
    token_ids, few = kept.token_ids[:, 0], jnp.maximum(kept.token_ids, 0)[:, :4]
    read = sampling.verify(by_slot, drawn, slots, positions, k=3)
    digests = kernels.row_digests(x)
    flat_ids, flat_num = ids[:3], jnp.array([1, 2], jnp.int32)

    def total(function):
        return lambda x: function(x).sum()

    return {
        "row_digests": lambda: kernels.row_digests(x),
        "equal_digests": lambda: kernels.equal_digests(digests, digests),
        "topk_logprobs": lambda: kernels.topk_logprobs(x, ids, 5),
        "topk_logprobs, all options": lambda: kernels.topk_logprobs(
            x, ids, 5, row_ids=all_rows, num_rows=6, temperatures=temperatures,
            extra_token_ids=column, log_sum_exp=True, entropy=True, top_logits=True,
        ),
        "topk_logprobs, inclusive": lambda: kernels.topk_logprobs(
            x, ids, 5, rank_ties="inclusive"
        ),
        "topk_logprobs, changes": lambda: kernels.topk_logprobs(
            x, ids, 5, allowed=allowed, bias_token_ids=column, bias=ones
        ),
        "topk_logprobs, vmap": lambda: jax.vmap(
            lambda x, ids: kernels.topk_logprobs(x, ids, 5)
        )(by_slot, by_position),
        "topk_logprobs, grad": lambda: jax.grad(
            total(lambda x: kernels.topk_logprobs(x, ids, 5).logprobs)
        )(x),
        "greedy": lambda: kernels.greedy(x),
        "linear_topk_logprobs": lambda: kernels.linear_topk_logprobs(hidden, head, ids, 5),
        "linear_topk_logprobs, grad": lambda: jax.grad(
            total(lambda h: kernels.linear_topk_logprobs(h, head, ids, 0).logprobs)
        )(hidden),
        "linear_support_kl": lambda: kernels.linear_support_kl(
            hidden, head, all_rows[:, None] + jnp.array([[1, 9]], jnp.int32),
            jnp.full((6, 2), -2.0, jnp.float32),
        ),
        "linear_kept_logprobs": lambda: kernels.linear_kept_logprobs(
            hidden, head, token_ids, few
        ),
        "logprobs_tensors": lambda: kernels.logprobs_tensors(x, ids, 5),
        "logprobs_tensors, some columns": lambda: kernels.logprobs_tensors(
            x, ids, 5, top_k_nums=all_rows
        ),
        "padded_token_ids": lambda: kernels.padded_token_ids([[1, 2], [3]], 2),
        "draw": lambda: sampling.draw(first, slots, positions),
        "verify, greedy": lambda: sampling.verify(
            by_slot, certain, greedy, positions, all_greedy=True
        ),
        "verify, certain": lambda: sampling.verify(by_slot, certain, slots, positions),
        "verify, drawn": lambda: sampling.verify(by_slot, drawn, slots, positions),
        "verify, k": lambda: sampling.verify(by_slot, drawn, slots, positions, k=3),
        "verify, a rule": lambda: sampling.verify(
            by_slot, drawn, slots, positions, accept=_always
        ),
        "verify, flat": lambda: sampling.verify(x, certain, slots, positions, row_ids=row_ids),
        "verify, dense": lambda: sampling.verify(by_slot, dense, slots, positions),
        "verify, block": lambda: sampling.verify(by_slot, drawn, slots, positions, rule="block"),
        "verify, block, dense": lambda: sampling.verify(
            by_slot, dense, slots, positions, rule="block"
        ),
        "verify, logits of drafts": lambda: sampling.verify(
            by_slot, of_logits, slots, positions
        ),
        "emitted_logprobs": lambda: sampling.emitted_logprobs(by_slot, read),
        "logprobs_of_read": lambda: sampling.logprobs_of_read(
            by_slot, by_position, read.read
        ),
        "truncation": lambda: sampling.truncation(x, rows),
        "kept_sets": lambda: sampling.kept_sets(x, all_rows, 6, cut),
        "kept_logprobs": lambda: sampling.kept_logprobs(x, token_ids, kept, 0.8),
        "kept_logprobs, grad": lambda: jax.grad(
            total(lambda x: sampling.kept_logprobs(x, token_ids, kept, 0.8))
        )(x),
        "rollout_logprobs": lambda: sampling.rollout_logprobs(x, token_ids),
        "rollout_logprobs, kept": lambda: sampling.rollout_logprobs(
            x, token_ids, kept, temperatures
        ),
        "rollout_logprobs, grad": lambda: jax.grad(
            total(lambda x: sampling.rollout_logprobs(x, token_ids, kept, temperatures))
        )(x),
        "learner_logprobs": lambda: sampling.learner_logprobs(
            hidden, head, token_ids, kept, 0.8
        ),
        "kept_logprobs, digests": lambda: sampling.kept_logprobs(
            x, token_ids, kept, 0.8, row_digests=digests
        ),
        "check_kept": lambda: sampling.check_kept(kept, V),
        "check_digests": lambda: sampling.check_digests(digests, digests),
        "row_ids_of": lambda: sampling.row_ids_of(lengths, 3),
        "Sampling.of": lambda: sampling.Sampling.of(3, temperature=0.5, top_k=3),
        "Sampling.of, key": lambda: sampling.Sampling.of(3, key=key),
        "Drafts.of_flat": lambda: sampling.Drafts.of_flat(flat_ids, flat_num, 2),
        "Drafts.none": lambda: sampling.Drafts.none(2, 2, V),
        "Drafts.joined": lambda: sampling.Drafts.joined(parts, num),
    }  # fmt: skip


def _always(u, p, q):
    return p >= 0
