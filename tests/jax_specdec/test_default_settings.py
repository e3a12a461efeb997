"""Calls as users make them: JAX's default settings, in a process without the suite's checks.

The examples, and those of the README, run in processes of their own too (`tests/docs`).
"""

import os
import subprocess
import sys

from tests.support import quick_compile

CALLS = """
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.sampling import Drafts, Sampling, draw, verify

N, V = 4000, 7
row = np.random.default_rng(0).normal(size=V).astype(np.float32)
p = np.exp(row) / np.exp(row).sum()
logits = np.broadcast_to(row, (N, 1, V))
none = Drafts(np.zeros((N, 0), np.int32), np.zeros(N, np.int32))
base = Sampling.greedy(N)._replace(temperature=np.ones(N, np.float32))
call, drawing = jax.jit(verify), jax.jit(draw)

def sampled(seed, positions=np.zeros(N, np.int32)):
    return np.asarray(call(logits, none, base._replace(seed=seed), positions).token_ids)[:, 0]

def drawn(seed):
    ids = drawing(logits, base._replace(seed=seed), np.zeros(N, np.int32)).token_ids
    return np.asarray(ids)[:, 0]

seeds = np.arange(N) - N // 2
known = seeds.astype(np.uint32)
expected, proposed = sampled(known), drawn(known)
counts = np.bincount(expected, minlength=V)
assert ((counts - N * p) ** 2 / (N * p)).sum() < 30, counts  # 6 degrees: 1 of 25,000
assert (sampled(seeds, np.zeros(N, np.int64)) == expected).all()  # int32 to JAX
assert (sampled(jnp.asarray(seeds)) == expected).all()
assert (drawn(seeds) == proposed).all()
# A dozen calls of types that only JAX's promotion joins.
from pallas_kernels import greedy_topk_logprobs, linear_topk_logprobs, topk_logprobs
few = jnp.asarray(np.random.default_rng(1).normal(size=(3, 40)), jnp.float32)
ids = jnp.arange(3)
plain = topk_logprobs(few, ids, 2)
for other in (
    topk_logprobs(np.asarray(few), np.arange(3, dtype=np.int32), 2),
    topk_logprobs(few, ids, 2, temperatures=jnp.ones(3), num_rows=3),
    topk_logprobs(few, ids, 2, row_ids=ids, extra_token_ids=ids[:, None]),
    jax.vmap(lambda x, i: topk_logprobs(x[None], i[None], 2))(few, ids),
):
    assert np.allclose(np.asarray(other.logprobs).reshape(3, 3), plain.logprobs, atol=1e-6)
    assert (np.asarray(other.token_ids).reshape(3, 3) == plain.token_ids).all()
assert (greedy_topk_logprobs(few, 2).token_ids[:, 1:] == plain.token_ids[:, 1:]).all()
eye = jnp.eye(40)
found = linear_topk_logprobs(few, eye, ids, 2)
assert (found.token_ids == plain.token_ids).all()
"""


def test_calls_hold_with_the_default_settings_of_jax() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_compile.FLAGS}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = [sys.executable, "-c", CALLS]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
