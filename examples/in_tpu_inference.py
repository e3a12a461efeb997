"""A tiny model's step in tpu-inference, with and without `install()`: one loss, less memory.

    pip install tpu-inference==0.32.0 && pip install . && python examples/in_tpu_inference.py

A step draws a token for each request, greedily, and takes its logprob and top K: the functions that
its runner calls.
"""

import jax
import jax.numpy as jnp
from tpu_inference.layers.jax.sample import sampling
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata

from jax_specdec.adapters import tpu_inference

REQUESTS, VOCAB, SIZE, K = 256, 32_000, 64, 20


def step(weights, ids, key, mesh):
    """Compute the drawn tokens, and the logprobs of them and of the top K."""
    logits = weights["embedding"][ids] @ weights["head"]
    options = TPUSupportedSamplingMetadata(
        temperature=jnp.full(REQUESTS, -1.0), top_k=jnp.zeros(REQUESTS, jnp.int32),
        top_p=jnp.ones(REQUESTS), do_sampling=False, logprobs=True,
    )  # fmt: skip
    tokens = sampling.sample(key, mesh, logits, options)
    tokens = tokens[0] if isinstance(tokens, tuple) else tokens
    return tokens, sampling.compute_and_gather_logprobs(logits, tokens, K)[1]


def run(weights, ids, mesh):
    """Tell the loss, the tokens, and the MB that the compiled step takes."""
    call = jax.jit(lambda weights, ids, key: step(weights, ids, key, mesh))
    program = call.lower(weights, ids, jax.random.key(2)).compile()
    tokens, logprobs = program(weights, ids, jax.random.key(2))
    return -logprobs[:, 0].mean(), tokens, program.memory_analysis().temp_size_in_bytes / 1e6


def main():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {
        "embedding": jax.random.normal(keys[0], (VOCAB, SIZE)),
        "head": jax.random.normal(keys[1], (SIZE, VOCAB)) * SIZE**-0.5,
    }
    ids = jax.random.randint(keys[2], (REQUESTS,), 0, VOCAB)
    mesh = jax.make_mesh((1, 1), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        loss, tokens, memory = run(weights, ids, mesh)
        print(f"tpu-inference' own  loss {loss:.4f}, {memory:.1f} MB")
        with tpu_inference.install() as names:
            loss, own, memory = run(weights, ids, mesh)
            print(f"installed           loss {loss:.4f}, {memory:.1f} MB")
    print(f"{int((own == tokens).sum())} of {REQUESTS} tokens are the same")
    print("in the place of", *names)


if __name__ == "__main__":
    main()
