"""A Flax NNX model, trained for a moment, then decoded with speculation and exact logprobs.

    pip install flax
    python examples/nnx_model.py

NNX modules hold their state; the decoding step is a pure function. `nnx.split` joins the two: the
graph definition is static, the weights are an argument. There is no worker and no ring: messages
are decoded where they are made.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_step
import story
from flax import nnx
from own_loop import admit_all, show

from jax_specdec.device import check, options_of_requests, widths_of
from jax_specdec.engine import decode
from jax_specdec.engine import output_processor as processor

WINDOW = 8  # characters that the model sees


class WindowModel(nnx.Module):
    """A perceptron over the last `window` characters (Bengio et al., JMLR 3, 2003)."""

    def __init__(self, window: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.window = window
        self.embed = nnx.Embed(story.VOCAB, 16, rngs=rngs)
        self.hidden = nnx.Linear(16 * window, width, rngs=rngs)
        self.out = nnx.Linear(width, story.VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Compute logits [B, S, V] of what follows `positions` [B, S] in `tokens` [B, T]."""
        return self.out(self.features(tokens, positions))

    def features(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Compute the last hidden layer [B, S, E] at `positions` [B, S] of `tokens` [B, T]."""
        return self.layer(self.seen(tokens, positions))

    def seen(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Look up the embeddings [B, S, _] of the last characters at each position."""
        places = positions[..., None] + jnp.arange(1 - self.window, 1)
        rows = jnp.arange(tokens.shape[0])[:, None, None]
        embedded = self.embed(tokens[rows, jnp.maximum(places, 0)])
        return embedded.reshape(*positions.shape, -1)

    def layer(self, seen: jax.Array) -> jax.Array:
        """Compute the hidden layer of each row."""
        return nnx.relu(self.hidden(seen))


def train(model: WindowModel, steps: int) -> float:
    """Teach the model the text; returns its last loss in nats a character."""
    text = jnp.array([story.encode(story.TEXT)], jnp.int32)
    places = jnp.arange(text.shape[1] - 1)[None]
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def update(model, optimizer):
        def loss(model):
            logprobs = jax.nn.log_softmax(model(text, places))
            return -jnp.take_along_axis(logprobs, text[:, 1:, None], axis=-1).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    return float([update(model, optimizer) for _ in range(steps)][-1])


def main() -> None:
    target = WindowModel(WINDOW, 64, rngs=nnx.Rngs(0))
    drafter = WindowModel(2, 32, rngs=nnx.Rngs(1))
    print(f"trained to {train(target, 60):.2f} and {train(drafter, 60):.2f} nats a character")

    # From here on, pure functions: the definitions are static, the weights are arguments.
    (target_def, target_weights), (drafter_def, drafter_weights) = map(nnx.split, (target, drafter))
    asks = [request.params for request in story.REQUESTS]
    widths = widths_of(asks, story.VOCAB)

    @jax.jit
    def step(target_weights, drafter_weights, loop, asked):
        target = nnx.merge(target_def, target_weights)
        drafter = nnx.merge(drafter_def, drafter_weights)
        return own_step.step(target, drafter, loop, asked, widths)

    advance = partial(step, target_weights, drafter_weights)
    loop, asked = own_step.start(story.REQUESTS), options_of_requests(asks, widths)
    state = admit_all(story.REQUESTS)
    while bool((loop.remaining > 0).any()):
        loop, *messages = advance(loop, asked)
        for words in messages:
            state, records = processor.step(state, decode(check(np.asarray(words))))
            for record in records:
                show(record)
    for request, ids, length in zip(story.REQUESTS, loop.tokens, loop.lengths, strict=True):
        print(f"{request.id:8}  {story.decode(ids[:length])}")
    print(f"accepted {state.statistics.acceptance_rate:.0%} of the drafts")


if __name__ == "__main__":
    main()
