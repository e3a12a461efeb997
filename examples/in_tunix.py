"""A tiny Qwen 2 in tunix' loss, with and without `install()`: one loss, less memory.

pip install google-tunix==0.1.7 && pip install . && python examples/in_tunix.py
"""

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen2 import model as qwen2
from tunix.rl import common

from jax_specdec.adapters import tunix

VOCAB, PROMPT, TOKENS, SIZE = 32_000, 8, 256, 64


def loss(state, graph, ids):
    """Compute minus the mean logprob of the completions, by tunix' own function."""
    return -common.compute_per_token_logps(
        graph, state, prompt_tokens=ids[:, :PROMPT], completion_tokens=ids[:, PROMPT:],
        pad_id=0, eos_id=1, stop_gradient=False,
    ).mean()  # fmt: skip


def step(state, graph, ids):
    """Tell the loss, the size of its gradient, and the MB that the compiled step takes."""
    call = jax.jit(jax.value_and_grad(lambda state, ids: loss(state, graph, ids)))
    program = call.lower(state, ids).compile()
    value, gradient = program(state, ids)
    size = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient)))
    return float(value), float(size), program.memory_analysis().temp_size_in_bytes / 1e6


def main():
    config = qwen2.ModelConfig(
        num_layers=1, vocab_size=VOCAB, embed_dim=SIZE, hidden_dim=SIZE, num_heads=2, head_dim=32,
        num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    graph, state = nnx.split(qwen2.Qwen2(config, rngs=nnx.Rngs(0)))
    ids = jax.random.randint(jax.random.key(1), (4, PROMPT + TOKENS), 2, VOCAB)
    print("tunix' own   loss {:.4f}, gradient {:.4f}, {:.0f} MB".format(*step(state, graph, ids)))
    with tunix.install(without_logits=True) as names:
        print(
            "installed    loss {:.4f}, gradient {:.4f}, {:.0f} MB".format(*step(state, graph, ids))
        )
    print("in the place of", *names)


if __name__ == "__main__":
    main()
