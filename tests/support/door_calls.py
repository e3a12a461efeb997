"""Right arguments and calls of every function of both doors, of arrays that are on the device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as kernels
from pallas_kernels import sampling
from pallas_kernels.sampling import DenseQ, Drafts, Sampling

V, H = 300, 8  # more than one group of 256 tokens

# What the doors have beside functions: types, and what is of a context, of this process's devices,
# and of a caller's own `shard_map`.
NO_CALLS = ("TopkLogprobs", "VocabShard", "CompactQ", "DenseQ", "Verified", "RowsRead",
            "Truncation", "use_implementation", "gpu_obstacle", "vary_like")  # fmt: skip


def door_calls():
    """A function without arguments for each name; its results are finite numbers and ids."""
    arguments, others = calls_of(V)
    return {name: partial(call, **given) for name, (call, given) in arguments.items()} | others


def calls_of(vocabulary):
    """(function, its arguments) by name, and functions without arguments of further calls.

    A name is that of the door, or begins with it and says how it is called.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(scale=3, size=(6, vocabulary)), jnp.float32)
    by_slot = x.reshape(2, 3, vocabulary)
    ids = jnp.asarray(rng.integers(0, vocabulary, 6), jnp.int32)
    column, by_position, t = ids[:, None], ids.reshape(2, 3), jnp.full(6, 0.8, jnp.float32)
    row_ids = jnp.arange(6, dtype=jnp.int32)
    listed = {"row_ids": row_ids, "num_rows": jnp.int32(6)}
    of_rows = listed | {"temperatures": t, "extra_token_ids": column}
    changes = {"allowed": jnp.full((6, -(-vocabulary // 32)), -1, jnp.int32),
               "bias_token_ids": column, "bias": jnp.ones((6, 1), jnp.float32)}  # fmt: skip
    logits, row = {"logits": x, "token_ids": ids}, {"logits": x}
    hidden, head = (jnp.asarray(rng.normal(size=(n, H)), jnp.float32) for n in (6, vocabulary))
    product = {"hidden": hidden, "head": head}
    slots = Sampling.of(2, temperature=np.array([0.8, 1]), top_k=np.array([50, 0]),
                        top_p=np.array([0.9, 1]), seed=np.array([1, 2]))  # fmt: skip
    rows, key = Sampling.of(6, temperature=0.8, top_p=0.9), jax.random.key(0)
    positions, num = jnp.array([3, 4], jnp.int32), jnp.array([2, 1], jnp.int32)
    of_slots = {"sampling": slots, "positions": positions}
    certain = Drafts(ids[:4].reshape(2, 2), num)
    parts = [
        sampling.draw(by_slot[:, :1], **of_slots),
        sampling.draw(by_slot[:, 1:2], slots, positions + 1),
    ]
    drawn = Drafts.joined(parts, num)
    log_q = jax.nn.log_softmax(by_slot[:, :2])
    dense = certain._replace(q=DenseQ(log_q))
    rows_of_q = jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    flat_q = certain._replace(q=DenseQ(log_q.reshape(4, vocabulary), rows_of_q))
    of_logits = certain._replace(q=DenseQ.of_logits(by_slot[:, :2], 0.9))
    cut = sampling.truncation(x, rows)
    kept = sampling.kept_sets(x, row_ids, 6, cut)
    tokens, few = kept.token_ids[:, 0], jnp.maximum(kept.token_ids, 0)[:, :4]
    few = jnp.where(few == few[:, :1], -1, few).at[:, 0].set(few[:, 0])  # none twice
    support = row_ids[:, None] + jnp.array([[1, 9]], jnp.int32)
    verify = partial(sampling.verify, by_slot, **of_slots)
    read = verify(drawn, k=3)
    digests = kernels.row_digests(x)
    of_read = {"logits": by_slot, "token_ids": by_position, "scaled": jnp.ones(2, bool),
               "extra_token_ids": by_position}  # fmt: skip
    of_kept = {"logits": x, "token_ids": tokens, "kept": kept, "temperatures": t}
    topk = partial(kernels.topk_logprobs, k=5)
    rollout = partial(sampling.rollout_logprobs, token_ids=tokens)

    def always(u, p, q):
        return p >= 0

    def gradient(function, x):
        return lambda: jax.grad(lambda x: function(x).sum())(x)

    return {
        "topk_logprobs, all options": (
            kernels.topk_logprobs,
            {**logits, "k": 5, **of_rows, "log_sum_exp": True, "entropy": True, "top_logits": True},
        ),
        "topk_logprobs, changes": (kernels.topk_logprobs, {**logits, "k": 5, **changes}),
        "greedy": (kernels.greedy, row),
        "row_digests": (kernels.row_digests, {**row, **listed}),
        "equal_digests": (kernels.equal_digests, {"a": digests, "b": digests}),
        "linear_topk_logprobs": (
            kernels.linear_topk_logprobs, {**product, "token_ids": ids, "k": 5, **of_rows}
        ),
        "linear_kept_logprobs": (
            kernels.linear_kept_logprobs, {**product, "token_ids": tokens, "kept_token_ids": few}
        ),
        "linear_support_kl": (
            kernels.linear_support_kl,
            {**product, "support_ids": support, "temperatures": t,
             "support_logprobs": jnp.full((6, 2), -2.0, jnp.float32)},
        ),
        "logprobs_tensors, n": (
            kernels.logprobs_tensors, {**logits, "k": 5, "top_k_nums": row_ids}
        ),
        "draw": (sampling.draw, {"draft_logits": by_slot[:, :1], **of_slots}),
        "draw, flat": (
            sampling.draw, {"draft_logits": x, **of_slots, "row_ids": jnp.array([1, 2], jnp.int32)}
        ),
        "verify": (
            sampling.verify,
            {"logits": by_slot, "drafts": dense, **of_slots, "k": 3}
            | {name: part.reshape(2, 3, -1) for name, part in changes.items()},
        ),
        "verify, flat": (
            sampling.verify,
            {**row, "drafts": flat_q, **of_slots, "row_ids": row_ids.reshape(2, 3), **changes},
        ),
        "verify, drawn": (sampling.verify, {"logits": by_slot, "drafts": drawn, **of_slots}),
        "emitted_logprobs": (sampling.emitted_logprobs, {"verified": read, **of_read}),
        "logprobs_of_read": (sampling.logprobs_of_read, {"read": read.read, **of_read}),
        "truncation": (sampling.truncation, {**row, "sampling": rows}),
        "kept_sets": (
            sampling.kept_sets,
            {**row, "rows": row_ids, "num_rows": jnp.int32(6), "cut": cut, **changes},
        ),
        "kept_logprobs": (sampling.kept_logprobs, {**of_kept, "row_digests": digests}),
        "rollout_logprobs": (sampling.rollout_logprobs, {**of_kept, "row_digests": digests}),
        "check_kept": (sampling.check_kept, {"kept": kept, "vocab_size": vocabulary}),
        "check_digests": (sampling.check_digests, {"digests": digests, "rollout_digests": digests}),
        "learner_logprobs": (
            sampling.learner_logprobs,
            {**product, "token_ids": tokens, "kept": kept, "temperatures": t},
        ),
        "row_ids_of": (sampling.row_ids_of, {"num_rows": num, "num_positions": 3}),
        "Sampling.of": (
            Sampling.of,
            {"num_slots": 2, "temperature": np.ones(2, np.float32), "top_k": np.zeros(2, np.int32),
             "top_p": np.ones(2, np.float32), "min_p": np.zeros(2, np.float32),
             "seed": np.arange(2)},
        ),
        "Sampling.greedy": (Sampling.greedy, {"num_slots": 2}),
        "Drafts.of_flat": (Drafts.of_flat, {"token_ids": ids[:3], "num": num, "width": 2}),
        "Drafts.none": (Drafts.none, {"num_slots": 2, "num_drafts": 2, "vocab_size": vocabulary}),
        "Drafts.joined": (Drafts.joined, {"drawn": parts, "limit": num}),
    }, {
        "topk_logprobs": lambda: topk(x, ids),
        "topk_logprobs, inclusive": lambda: topk(x, ids, rank_ties="inclusive"),
        "topk_logprobs, vmap": lambda: jax.vmap(topk)(by_slot, by_position),
        "topk_logprobs, grad": gradient(lambda x: topk(x, ids).logprobs, x),
        "row_digests, all rows": lambda: kernels.row_digests(x),
        "linear_topk_logprobs, plain": lambda: kernels.linear_topk_logprobs(hidden, head, ids, 5),
        "linear_topk_logprobs, grad": gradient(
            lambda hidden: kernels.linear_topk_logprobs(hidden, head, ids, 0).logprobs, hidden
        ),
        "logprobs_tensors": lambda: kernels.logprobs_tensors(x, ids, 5),
        "padded_token_ids": lambda: kernels.padded_token_ids([[1, 2], [3]], 2),
        "verify, greedy": partial(verify, certain, sampling=Sampling.greedy(2), all_greedy=True),
        "verify, certain": lambda: verify(certain),
        "verify, k": lambda: verify(drawn, k=3),
        "verify, a rule": lambda: verify(drawn, accept=always),
        "verify, certain and flat": lambda: sampling.verify(
            x, certain, slots, positions, row_ids=row_ids.reshape(2, 3)
        ),
        "verify, dense": lambda: verify(dense),
        "verify, block": lambda: verify(drawn, rule="block"),
        "verify, block, dense": lambda: verify(dense, rule="block"),
        "verify, logits of drafts": lambda: verify(of_logits),
        "emitted_logprobs, as read": lambda: sampling.emitted_logprobs(by_slot, read),
        "logprobs_of_read, T": partial(sampling.logprobs_of_read, by_slot, by_position, read.read),
        "kept_sets, all rows": lambda: sampling.kept_sets(x, row_ids, 6, cut),
        "kept_logprobs, one temperature": lambda: sampling.kept_logprobs(x, tokens, kept, 0.8),
        "kept_logprobs, grad": gradient(lambda x: sampling.kept_logprobs(x, tokens, kept, 0.8), x),
        "rollout_logprobs, raw": lambda: rollout(x),
        "rollout_logprobs, kept": lambda: rollout(x, kept=kept, temperatures=t),
        "rollout_logprobs, grad": gradient(lambda x: rollout(x, kept=kept, temperatures=t), x),
        "learner_logprobs, T": partial(sampling.learner_logprobs, hidden, head, tokens, kept, 0.8),
        "Sampling.of, numbers": lambda: Sampling.of(3, temperature=0.5, top_k=3),
        "Sampling.of, key": lambda: Sampling.of(3, key=key),
    }  # fmt: skip
