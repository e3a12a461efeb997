"""A Flax NNX model inside this package's worker, engine and server.

    pip install flax
    python examples/nnx_engine.py             # the engine
    python examples/nnx_engine.py DIR         # writes the tokenizer, and says how to serve

It is the model of `nnx_model.py`, as `jax_specdec.device.model.OwnModel` asks for it: the graph
definition is the static part, and what `nnx.split` leaves is the weights. Its rows are computed in
tiles, so `sequence_logprobs` gives a learner the bits of the engine.
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
    row_tile: int = 8  # rows that a product takes at once

    def forward(self, params, tokens, positions, cache):
        """Write the tokens, and return what the module makes of the last characters of each row."""
        from flax import nnx

        from jax_specdec.device.model import over_rows

        text, cache = self.written(tokens, positions, cache)
        module = nnx.merge(self.definition, params)
        return over_rows(module.layer, module.seen(text, positions), tile=self.row_tile), cache

    def logits(self, params, hidden):
        """Ask the module's last layer."""
        from flax import nnx

        from jax_specdec.device.model import over_rows

        last = nnx.merge(self.definition, params).out
        return over_rows(last, hidden, tile=self.row_tile, axes=hidden.ndim - 1)


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
