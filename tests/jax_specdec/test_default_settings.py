"""Calls as users make them: JAX's default settings, in a process without the suite's checks."""

import os
import subprocess
import sys

CALLS = """
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.sampling.drafts import draw
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.verify import Drafts, verify

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
for given in (seeds, seeds.astype(np.int32), jnp.asarray(seeds, jnp.int32)):
    assert (sampled(given) == expected).all(), given.dtype
    assert (drawn(given) == proposed).all(), given.dtype
assert (sampled(known, np.zeros(N, np.int64)) == expected).all()

eager = verify(
    logits[:2], Drafts(none.token_ids[:2], none.num[:2]),
    jax.tree.map(lambda x: x[:2], base), np.zeros(2, np.int64),
)
assert (np.asarray(eager.num_tokens) == 1).all()

def refused(kind, words, **changed):
    given = dict(logits=logits, drafts=none, sampling=base, positions=np.zeros(N, np.int32))
    try:
        verify(**(given | changed))
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")

def seeded(seed):
    return base._replace(seed=seed)

refused(ValueError, "logits (4000, 7)", logits=logits[:, 0])
refused(TypeError, "logits is a list", logits=logits.tolist())
refused(TypeError, "drafts is a ndarray", drafts=none.token_ids)
refused(TypeError, "sampling.seed is of float32", sampling=seeded(np.ones(N, np.float32)))
refused(TypeError, "JAX key", sampling=seeded(jax.random.split(jax.random.key(0), N)))
refused(TypeError, "JAX keys", sampling=seeded(jax.random.split(jax.random.PRNGKey(0), N)))
refused(TypeError, "seed is of a JAX key", sampling=seeded(jax.random.key(0)))
refused(ValueError, "sampling.top_k (1,)", sampling=base._replace(top_k=np.zeros(1, np.int32)))
refused(ValueError, "positions ()", positions=jnp.int32(0))
refused(ValueError, "drafts.num (1,)", drafts=none._replace(num=np.zeros(1, np.int32)))
"""


def test_calls_hold_with_the_default_settings_of_jax() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
