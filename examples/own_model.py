"""A model of your own inside this package's worker and engine: `python examples/own_model.py`.

The model is a table of what follows three characters. Yours has layers and weights; the engine
asks of it what `jax_specdec.device.model.OwnModel` lists, and drafts, verifies, samples and scores.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import story

from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, Serves

BEFORE = 3  # tokens that the next one depends on


class Windowed:
    """The cache of a model that looks at the last tokens themselves, and keeps no states."""

    def init_cache(self, num_slots, length):
        """Make room for the tokens: a slot's entry of a position is its id."""
        import jax.numpy as jnp

        from jax_specdec.device.model import KVCache

        return KVCache(*(jnp.zeros((1, num_slots, length, 1, 1)) for _ in range(2)))

    def written(self, tokens, positions, cache):
        """Write the tokens [B, S]; returns all that are known, [B, T] int32, and the cache."""
        import jax.numpy as jnp

        from jax_specdec.device.model import KVCache

        slots, length = jnp.arange(tokens.shape[0])[:, None], cache.k.shape[2]
        # A padding row's place is out of bounds, and dropped; a negative one would wrap around.
        place = jnp.where(positions < 0, length, positions)
        known = cache.k.at[0, slots, place, 0, 0].set(tokens.astype(jnp.float32), mode="drop")
        return known[0, :, :, 0, 0].astype(jnp.int32), KVCache(known, cache.v)


@dataclass(frozen=True)
class Table(Windowed):
    """The model's static part; its weights are the table [V, V, V, V]."""

    vocab_size: int
    dtype: str = "float32"

    def forward(self, params, tokens, positions, cache):
        """Write the tokens, and return the last three ids up to each row as its hidden state."""
        import jax.numpy as jnp

        text, cache = self.written(tokens, positions, cache)
        back = positions[..., None] - jnp.arange(BEFORE - 1, -1, -1)
        slots = jnp.arange(tokens.shape[0])[:, None, None]
        return text[slots, jnp.maximum(back, 0)].astype(jnp.float32), cache

    def logits(self, params, hidden):
        """Look the ids up."""
        ids = hidden.astype("int32")
        return params[tuple(ids[..., at] for at in range(BEFORE))]


def make(config):
    """Make the weights and the model in the worker, as `EngineConfig.own_model` asks for them."""
    import jax.numpy as jnp

    table = jnp.asarray(story.log_probabilities(BEFORE), jnp.float32)
    return table, Table(table.shape[-1])


def tell(make, texts, max_tokens):
    """Print what follows some characters of the story, by the model that `make` names."""
    # The worker imports the module by its name.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    params = SamplingParams(max_tokens=max_tokens, logprobs=2)
    config = EngineConfig(
        vocab_size=story.VOCAB, own_model=make, drafter="ngram", num_slots=2, max_length=128,
        serves=Serves.of([params]),
    )  # fmt: skip
    requests = [
        Request(id=text, prompt_token_ids=story.encode(text), params=params) for text in texts
    ]
    with Engine(config) as engine:
        records_of = {text: [] for text in texts}
        for update in engine.generate(requests):
            for record in update.records:
                records_of[record.request_id].append(record)
    for text, records in records_of.items():
        ids = [id for record in records for id in record.token_ids.tolist()]
        accepted = records[-1].statistics.num_accepted
        print(f"{text}{story.decode(ids)}  ({accepted} drafts accepted)")


if __name__ == "__main__":
    tell("own_model:make", ("the Rabbit", "So she"), max_tokens=40)
