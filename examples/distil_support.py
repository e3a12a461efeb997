"""Distillation without logits: a teacher scored by the engine, and a student that learns from it.

    python examples/distil_support.py

The engine scores texts: for each token behind the first 32, the teacher's 32 likeliest ids and
their logprobs (`prompt_logprobs`, from `prompt_logprobs_start` on). The student is a small model of
the last four tokens. Its loss is the divergence between the teacher's support, with one bucket for
the rest, and the student's hidden states with its head: no logits exist, in the gradient neither.
What the compiled step takes is printed beside the plain way, at a vocabulary of 32,768.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, Serves, byte_tokens
from pallas_kernels import linear_support_kl

K, START, CONTEXT, HIDDEN, STEPS, RATE = 32, 32, 4, 64, 40, 0.5
TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n# The end.\n"
TEXTS = (TEXT, TEXT.replace("a", "x"), TEXT.replace("return", "yield"))


def supports():
    """Score the texts: ids [N, 96] before each token, and the teacher's support [N, K] of it."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=K, prompt_logprobs_start=START)
    prompts = [byte_tokens.encode(text, start_document=True) for text in TEXTS]
    requests = [
        Request(id=str(n), prompt_token_ids=ids, params=params) for n, ids in enumerate(prompts)
    ]
    config = EngineConfig(
        vocab_size=byte_tokens.VOCAB_SIZE, num_slots=4, max_length=128, serves=Serves.of([params])
    )
    before, ids, logprobs = [], [], []
    with Engine(config) as engine:
        for update in engine.generate(requests):
            for record in update.records:
                if (rows := record.prompt) is not None:
                    text = prompts[int(record.request_id)]
                    places = rows.start + np.arange(len(rows.token_ids))
                    before.append(text[places[:, None] - np.arange(1, CONTEXT + 1)])
                    ids.append(rows.topk_ids)
                    logprobs.append(rows.logprobs[:, 1:])
    return tuple(map(np.concatenate, (before, ids, logprobs)))


def student(vocab, key):
    """Make weights: an embedding for each of the last four places, and a head."""
    embedding, head = jax.random.split(key)
    return {
        "embedding": jax.random.normal(embedding, (CONTEXT, vocab, HIDDEN)) * 0.3,
        "head": jax.random.normal(head, (vocab, HIDDEN)) * HIDDEN**-0.5,
    }


def hidden_of(weights, before):
    """Compute hidden states [N, H]."""
    return jnp.tanh(sum(weights["embedding"][n][before[:, n]] for n in range(CONTEXT)))


def loss(weights, before, ids, logprobs):
    """Compute the forward divergence, its mean over the tokens."""
    return linear_support_kl(hidden_of(weights, before), weights["head"], ids, logprobs).mean()


def plain_loss(weights, before, ids, logprobs):
    """Compute the same from whole logits: the recipe without this library."""
    scores = jax.nn.log_softmax(hidden_of(weights, before) @ weights["head"].T)
    own = jnp.take_along_axis(scores, ids, axis=1)
    mass = jnp.exp(logprobs)
    rest = 1 - mass.sum(1)
    of_rest = rest * (jnp.log(rest) - jnp.log1p(-jnp.exp(own).sum(1)))
    return jnp.mean(jnp.sum(mass * (logprobs - own), axis=1) + of_rest)


@jax.jit
def step(weights, *batch):
    """Take one step of gradient descent."""
    value, by = jax.value_and_grad(loss)(weights, *batch)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, by), value


def temporaries(function, vocab=32_768, rows=1024):
    """Tell the MB that the compiled gradient takes beside weights and results."""
    shape = jax.ShapeDtypeStruct
    weights = jax.eval_shape(lambda: student(vocab, jax.random.key(0)))
    batch = (shape((rows, CONTEXT), jnp.int32), shape((rows, K), jnp.int32),
             shape((rows, K), jnp.float32))  # fmt: skip
    compiled = jax.jit(jax.grad(function)).lower(weights, *batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 1e6


def main():
    before, ids, logprobs = supports()
    scored = sum(len(byte_tokens.encode(text, start_document=True)) - START for text in TEXTS)
    print(f"the teacher scored {len(ids)} of {scored} tokens; its support has "
          f"{np.exp(logprobs).sum(1).mean():.1%} of the mass")  # fmt: skip
    weights, values = student(byte_tokens.VOCAB_SIZE, jax.random.key(1)), []
    for _ in range(STEPS):
        weights, value = step(weights, before, ids, logprobs)
        values.append(float(value))
    print("divergence from the teacher, nats a token, by step:")
    for number in range(0, STEPS, 4):
        print(f"{number:4} {values[number]:5.2f} {'#' * round(12 * values[number])}")
    ours, plain = temporaries(loss), temporaries(plain_loss)
    print(f"a step of 1,024 rows x 32,768: {ours:.0f} MB of temporaries, plain {plain:.0f} MB")


if __name__ == "__main__":
    main()
