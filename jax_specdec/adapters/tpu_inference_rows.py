"""Eight rows for each function of tpu-inference, for which theirs and ours must agree.

Where tokens are sampled, one of them can be drawn: the results do not depend on random numbers.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_specdec.adapters.tpu_inference_sampling import RejectionSampler

V = 40


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Lengths:
    """Lengths that processed logprobs look at: how many drafts each request has, [B]."""

    draft_lengths: jax.Array


def of_logprobs() -> tuple[Any, ...]:
    """The logits [8, V] of tokens, of which one is the least and one the most likely; K = 5."""
    logits, _ = _logits_and_drafts()
    tokens = logits.argmax(axis=1).astype(jnp.int32)
    return logits, tokens.at[1].set(logits[1].argmin().astype(jnp.int32)).at[2:5].set(7), 5


def of_filter() -> tuple[Any, ...]:
    """Of two shards: request 0's two drafts, the second one rejected, request 1's one; bonuses."""
    ids = np.asarray([[3, 1], [-1, 2], [4, 3], [9, 9], [5, 5], [6, 6], [7, 7], [9, 9]], np.int32)
    metadata = SimpleNamespace(
        final_logits_indices=np.zeros(4, np.int32),
        draft_lengths_cpu=np.asarray([2, 0, 1, 0]),
        req_indices_dp={0: [0], 1: [1]},
    )
    return ids, ids * np.float32(-0.5), np.arange(8, dtype=np.int32), metadata, V, 2, 2


def of_verification(mesh: Mesh) -> Iterator[tuple[Any, ...]]:
    """Drafts of four requests, of which two have a wrong one: greedy, then sampled."""
    logits, drafts = _logits_and_drafts()
    num, bonus = jnp.asarray([3, 0, 1, 4], jnp.int32), jnp.arange(4, dtype=jnp.int32)
    for metadata in (_metadata(), _metadata(4, 0.5, 1, 1.0)):
        key = jax.random.key(1)
        yield RejectionSampler(mesh), drafts, num, None, logits, bonus, metadata, key


def of_sample(mesh: Mesh) -> tuple[Any, ...]:
    """A row of each of eight requests."""
    logits, _ = _logits_and_drafts()
    return jax.random.key(1), mesh, logits, _metadata(8, 0.5, 1, 1.0)


def of_processed_logits(mesh: Mesh) -> tuple[Any, ...]:
    """The drafts' logits, and bonus tokens'."""
    logits, _ = _logits_and_drafts()
    lengths = Lengths(jnp.asarray([3, 0, 1, 4], jnp.int32))
    return mesh, logits, logits[:4], lengths, _metadata(4, 0.5, 7, 0.8)


def _logits_and_drafts() -> tuple[jax.Array, jax.Array]:
    logits = 3 * jax.random.normal(jax.random.key(0), (8, V))
    return logits, logits.argmax(axis=1).astype(jnp.int32).at[jnp.asarray([1, 6])].set(V - 1)


def _metadata(number: int = 0, *options: float) -> Any:
    """Their sampling metadata of so many requests; of none, all are greedy."""
    path = "tpu_inference.layers.jax.sample.sampling_metadata"
    kind = importlib.import_module(path).TPUSupportedSamplingMetadata
    if not number:
        return kind()
    dtypes = (jnp.float32, jnp.int32, jnp.float32)
    arrays = (jnp.full(number, x, dtype) for x, dtype in zip(options, dtypes, strict=True))
    return kind(*arrays, do_sampling=True)
