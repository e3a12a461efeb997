"""tpu-inference: the tokens of a step, and the processed logits that they were drawn from.

Each function has tpu-inference's signature. Drafts, bonus tokens and the processed logits of both
are of one distribution: temperature, then top-k, then top-p.

Axes: B requests, N drafts, V vocabulary; of each data-parallel shard its own, padding behind them.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.sampling import DenseQ, Drafts, Sampling, Truncation, truncation, verify

P: Callable[..., PartitionSpec] = PartitionSpec  # with a type
GREEDY = 1e-5  # a temperature below is greedy, as in their `sample`
MASKED = -1e12  # the logit of a token that is not kept, as theirs


class RejectionSampler:
    """Their sampler's call; `parse_output`, which reads its result on the host, stays theirs."""

    def __init__(self, mesh: Mesh) -> None:
        """A sampler on `mesh`, whose data axes split drafts and requests."""
        self.mesh = mesh

    @partial(jax.jit, static_argnums=0)
    def forward(
        self,
        draft_token_ids: jax.Array,
        num_draft_tokens: jax.Array,
        draft_probs: jax.Array | None,
        target_logits: jax.Array,
        bonus_token_ids: jax.Array,
        sampling_metadata: Any,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Accepted drafts, recovered and bonus tokens; no row of logits is copied.

        Args:
          draft_token_ids: [N] int32, a request's after those of the one before.
          num_draft_tokens: [B] int32.
          draft_probs: [N, V] float, what drafts were drawn from; None: each was certain.
          target_logits: [N, V] bfloat16, float16 or float32.
          bonus_token_ids: [B] int32.
          sampling_metadata: `temperature` (below 1e-5: greedy), `top_k` (0 or less: all) and
            `top_p`, each [B], where `do_sampling`.
          key: a JAX key.

        Returns:
          [N + B] int32, by shard: the tokens in the drafts' places, then bonus tokens. It has -1
          from a request's first rejection on, and for padding.

        Raises:
          ValueError: requests are sampled, and there is no key.
        """
        if sampling_metadata.do_sampling and key is None:
            raise ValueError("A random key must be provided for non-greedy sampling.")
        if not draft_token_ids.size:
            return bonus_token_ids
        data, columns = _axes(self.mesh, target_logits.shape[1])
        options = _options(sampling_metadata)

        def of_shard(logits: Any, by_draft: Any, by_request: Any, key: Any) -> jax.Array:
            (x, probs), drafts, (num, bonus, options) = logits, by_draft, by_request
            owners, sampling = _owners(num, drafts.size), Sampling.greedy(drafts.size)
            if options is not None:
                own = jax.random.fold_in(key, lax.axis_index(data))
                sampling = Sampling.from_key(own, drafts.size, **_of_owners(options, owners))
            accepted, tokens = _each_alone(x, probs, drafts, owners < num.size, sampling, columns)
            return _until_rejected(accepted, tokens, owners, num, bonus)

        found: jax.Array = jax.shard_map(
            of_shard,
            mesh=self.mesh,
            in_specs=(P(data, columns or None), P(data), P(data), P()),
            out_specs=P(data),
        )(
            (target_logits, draft_probs),
            draft_token_ids,
            (num_draft_tokens, bonus_token_ids, options),
            key,
        )
        return found

    __call__ = forward


@partial(jax.jit, static_argnames=("mesh", "allow_distributed_sampling"))
def sample(
    rng: jax.Array,
    mesh: Mesh,
    logits: jax.Array,
    tpu_sampling_metadata: Any,
    allow_distributed_sampling: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """A token of each row, and the logits [B, V] float32 that processed logprobs are of.

    Args:
      rng: a JAX key.
      logits: [B, V] bfloat16, float16 or float32; they stay as they are split.
      tpu_sampling_metadata: as `RejectionSampler.forward` has it.
      allow_distributed_sampling: whether their sampler could leave the logits unprocessed, as
        nobody reads them; then these are returned as they are.
    """
    number = logits.shape[0]
    options = _options(tpu_sampling_metadata)
    sampling = Sampling.greedy(number)
    if options is not None:
        sampling = Sampling.from_key(rng, number, **options)
    nothing = Drafts(jnp.zeros((number, 0), jnp.int32), jnp.zeros(number, jnp.int32))
    found = verify(logits[:, None], nothing, sampling, jnp.zeros(number, jnp.int32))
    tokens: jax.Array = lax.with_sharding_constraint(  # type: ignore[no-untyped-call]
        found.token_ids[:, 0], NamedSharding(mesh, P())
    )
    logits = logits.astype(jnp.float32)
    theirs = importlib.import_module("tpu_inference.layers.jax.sample.sampling")
    fits = theirs._distributed_sampling_fits
    if options is None or (allow_distributed_sampling and fits(mesh, logits.shape[1])):
        return tokens, logits
    assert found.cut is not None
    return tokens, _processed(logits, jax.tree.map(lambda x: x[:, 0], found.cut), sampling)


@partial(jax.jit, static_argnames="mesh")
def process_and_extend_logits(
    mesh: Mesh,
    target_logits: jax.Array,
    processed_bonus_logits: jax.Array,
    spec_decode_metadata: Any,
    tpu_sampling_metadata: Any,
) -> jax.Array:
    """The drafts' logits as they are drawn from, and those of bonus tokens: [N + B, V] float32."""
    data, _ = _axes(mesh, 1)

    def of_shard(logits: Any, bonus: Any, num: Any, options: Any) -> jax.Array:
        rows = logits.shape[0]
        sampling = Sampling.of(rows, **_of_owners(options, _owners(num, rows)))
        processed = _processed(logits, truncation(logits, sampling), sampling)
        return jnp.concatenate([processed, bonus])

    found: jax.Array = jax.shard_map(of_shard, mesh=mesh, in_specs=P(data), out_specs=P(data))(
        target_logits,
        processed_bonus_logits,
        spec_decode_metadata.draft_lengths,
        _options(tpu_sampling_metadata),
    )
    return found


def _axes(mesh: Mesh, vocab_size: int) -> tuple[Any, tuple[str, ...]]:
    """The mesh axes of their data parallelism, and those that can split the vocabulary."""
    names = importlib.import_module("tpu_inference.layers.common.sharding").ShardingAxisName
    data, columns = (
        (x,) if isinstance(x, str) else tuple(x) for x in (names.ATTN_DATA, names.MLP_TENSOR)
    )
    columns = tuple(
        x for x in columns if x in mesh.axis_names and x not in data and mesh.shape[x] > 1
    )
    shards = math.prod(mesh.shape[x] for x in columns)
    return data, columns if vocab_size % shards == 0 else ()


def _options(metadata: Any) -> dict[str, jax.Array] | None:
    """The options [B] as `Sampling` has them; None where all requests are greedy."""
    if not metadata.do_sampling:
        return None
    return {
        "temperature": jnp.where(metadata.temperature < GREEDY, 0, metadata.temperature),
        "top_k": jnp.maximum(metadata.top_k, 0),
        "top_p": metadata.top_p,
    }


def _owners(num: jax.Array, number: int) -> jax.Array:
    """The request of each of `number` drafts; B of padding."""
    places = jnp.arange(number, dtype=jnp.int32)
    return jnp.searchsorted(jnp.cumsum(num), places, side="right").astype(jnp.int32)


def _of_owners(options: dict[str, jax.Array], owners: jax.Array) -> dict[str, jax.Array]:
    """The options of each draft's request."""
    return {name: x[jnp.minimum(owners, x.size - 1)] for name, x in options.items()}


def _each_alone(
    logits: jax.Array,
    probs: jax.Array | None,
    drafts: jax.Array,
    real: jax.Array,
    sampling: Sampling,
    columns: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """Whether each draft [N] is accepted, and it or what comes in its place.

    Each is verified as a slot of its own, whose next row is missing: a request may have any number
    of drafts, and no array is as wide as the longest.
    """
    own = jnp.arange(drafts.size, dtype=jnp.int32)[:, None]
    found = verify(
        logits,
        Drafts(
            drafts[:, None], jnp.ones_like(drafts), None if probs is None else DenseQ(probs, own)
        ),
        sampling,
        jnp.zeros_like(drafts),
        row_ids=jnp.where(real[:, None], jnp.concatenate([own, -jnp.ones_like(own)], 1), -1),
        bonus_token_ids=jnp.zeros_like(drafts),
        axis_name=columns,
    )
    return found.num_tokens == 2, found.token_ids[:, 0]


def _until_rejected(
    accepted: jax.Array, tokens: jax.Array, owners: jax.Array, num: jax.Array, bonus: jax.Array
) -> jax.Array:
    """The tokens [N] up to a request's first rejection; bonus tokens [B] where there is none."""
    rejections = jnp.pad(jnp.cumsum(~accepted, dtype=jnp.int32), (1, 0))  # before each draft
    ends = jnp.cumsum(num)
    begun = rejections[ends - num]
    before = rejections[:-1] - begun[jnp.minimum(owners, num.size - 1)]
    tokens = jnp.where((owners < num.size) & (before == 0), tokens, -1)
    return jnp.concatenate([tokens, jnp.where(rejections[ends] == begun, bonus, -1)])


def _processed(logits: jax.Array, cut: Truncation, sampling: Sampling) -> jax.Array:
    """Logits [N, V] as a row's token is drawn from them; a greedy row's are its own."""
    x = logits.astype(jnp.float32)
    ids = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape)
    sampled = (sampling.temperature > 0)[:, None]
    scale = jnp.where(sampled, sampling.temperature[:, None], 1)
    return jnp.where(sampled & ~cut.keeps(x, ids), MASKED, x / scale)
