"""A Flax NNX model inside this package's worker, engine and server.

    pip install flax
    python examples/nnx_engine.py             # the engine
    python examples/nnx_engine.py DIR         # writes the tokenizer, and says how to serve

It is the model of `nnx_model.py`, as `jax_specdec.device.model.OwnModel` asks for it: the graph
definition is the static part, and what `nnx.split` leaves is the weights.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import story

from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams

WINDOW = 8  # characters that the model sees


@dataclass(frozen=True)
class Windowed:
    """The model's static part; its weights are the state of the NNX module."""

    definition: Any  # nnx.GraphDef
    vocab_size: int = story.VOCAB
    dtype: str = "float32"

    def init_cache(self, num_slots, length):
        """Make room for the tokens themselves: a slot's entry of a position is its id."""
        import jax.numpy as jnp

        from jax_specdec.device.model import KVCache

        return KVCache(*(jnp.zeros((1, num_slots, length, 1, 1)) for _ in range(2)))

    def forward(self, params, tokens, positions, cache):
        """Write the tokens, and return what the module makes of the last characters of each row."""
        import jax.numpy as jnp
        from flax import nnx

        from jax_specdec.device.model import KVCache

        slots, length = jnp.arange(tokens.shape[0])[:, None], cache.k.shape[2]
        # A padding row's place is out of bounds, and dropped; a negative one would wrap around.
        place = jnp.where(positions < 0, length, positions)
        known = cache.k.at[0, slots, place, 0, 0].set(tokens.astype(jnp.float32), mode="drop")
        text = known[0, :, :, 0, 0].astype(jnp.int32)
        return nnx.merge(self.definition, params).features(text, positions), KVCache(known, cache.v)

    def logits(self, params, hidden):
        """Ask the module's last layer."""
        from flax import nnx

        return nnx.merge(self.definition, params).out(hidden)


def make(config):
    """Train the module for a moment in the worker, as `EngineConfig.own_model` asks for it."""
    from flax import nnx
    from nnx_model import WindowModel, train

    model = WindowModel(WINDOW, 64, rngs=nnx.Rngs(0))
    train(model, 60)
    definition, weights = nnx.split(model)
    return nnx.to_pure_dict(weights), Windowed(definition)


def main(folder=None):
    """Print what follows some characters of the story, or how to serve the model."""
    here = str(Path(__file__).parent)
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        story.write_tokenizer(folder)
        print(
            f"PYTHONPATH={here} jax-specdec serve --own-model nnx_engine:make --tokenizer {folder}"
        )
        return
    # The worker imports this file, by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    config = EngineConfig(
        vocab_size=story.VOCAB, own_model="nnx_engine:make", drafter="ngram", num_slots=2,
        max_length=128,
    )  # fmt: skip
    params = SamplingParams(max_tokens=60, logprobs=2)
    requests = [
        Request(id=text, prompt_token_ids=story.encode(text), params=params)
        for text in ("Alice was", "the Rabbit")
    ]
    with Engine(config) as engine:
        found = {request.id: [] for request in requests}
        for update in engine.generate(requests):
            for record in update.records:
                found[record.request_id].append(record)
    for text, records in found.items():
        ids = [id for record in records for id in record.token_ids.tolist()]
        accepted = records[-1].statistics.num_accepted
        print(f"{text}{story.decode(ids)}  ({accepted} drafts accepted)")


if __name__ == "__main__":
    main(*sys.argv[1:])
