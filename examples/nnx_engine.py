"""A Flax NNX model inside this package's worker, engine and server.

    pip install flax
    python examples/nnx_engine.py             # the engine
    python examples/nnx_engine.py DIR         # writes the tokenizer, and says how to serve

It is the model of `nnx_model.py`, as `jax_specdec.device.model.OwnModel` asks for it: the graph
definition is the static part, and what `nnx.split` leaves is the weights.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import own_model
import story

WINDOW = 8  # characters that the model sees


@dataclass(frozen=True)
class Module(own_model.Windowed):
    """The model's static part; its weights are the state of the NNX module."""

    definition: Any  # nnx.GraphDef
    vocab_size: int = story.VOCAB
    dtype: str = "float32"

    def forward(self, params, tokens, positions, cache):
        """Write the tokens, and return what the module makes of the last characters of each row."""
        from flax import nnx

        text, cache = self.written(tokens, positions, cache)
        return nnx.merge(self.definition, params).features(text, positions), cache

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
    return nnx.to_pure_dict(weights), Module(definition)


def main(folder=None):
    """Print what follows some characters of the story, or how to serve the model."""
    if folder is None:
        own_model.tell("nnx_engine:make", ("Alice was", "the Rabbit"), max_tokens=60)
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    story.write_tokenizer(folder)
    print(
        f"PYTHONPATH={Path(__file__).parent} jax-specdec serve --own-model nnx_engine:make "
        f"--tokenizer {folder}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
