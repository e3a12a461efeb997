"""tpu-inference: the tokens of a step, and the processed logits that they were drawn from.

Each function has tpu-inference's signature. Drafts, bonus tokens and the processed logits of both
are of one distribution: temperature, then top-k, then top-p.

Axes: B requests, N drafts, V vocabulary; of each data-parallel shard its own, padding behind them.
"""

import importlib
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.sampling import DenseQ, Drafts, Sampling, Truncation, truncation, verify

_GREEDY = 1e-5  # a temperature below is greedy, as in their `sample`
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
        """Accepted drafts, recovered and bonus tokens; no row of logits or of q is copied.

        Args:
          draft_token_ids: [N] int32, a request's after those of the one before.
          num_draft_tokens: [B] int32, any number of each.
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
        if options is None:
            draft_probs = None  # greedy requests take the best token, whatever was drafted

        def of_shard(rows: Any, drafts: jax.Array, by_request: Any, key: Any) -> jax.Array:
            logits, probs = rows
            num, bonus, options = by_request
            owners, sampling = _owners(num, drafts.size), None
            if options is not None:
                own_key = jax.random.fold_in(key, lax.axis_index(data))
                sampling = _sampling(_of_owners(options, owners), own_key)
            is_draft = owners < num.size
            tokens = _next_tokens(logits, probs, drafts, is_draft, sampling, columns)
            return _until_rejected(tokens, tokens == drafts, owners, num, bonus)

        by_data = _spec(data)
        tokens: jax.Array = jax.shard_map(
            of_shard,
            mesh=self.mesh,
            in_specs=(_spec(data, columns or None), by_data, by_data, _spec()),
            out_specs=by_data,
        )(
            (target_logits, draft_probs),
            draft_token_ids,
            (num_draft_tokens, bonus_token_ids, options),
            key,
        )
        return tokens

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
    sampling = Sampling.greedy(number) if options is None else _sampling(options, rng)
    no_drafts = Drafts(jnp.zeros((number, 0), jnp.int32), jnp.zeros(number, jnp.int32))
    drawn = verify(
        logits[:, None],
        no_drafts,
        sampling,
        jnp.zeros(number, jnp.int32),
        all_greedy=options is None,
    )
    tokens: jax.Array = lax.with_sharding_constraint(
        drawn.token_ids[:, 0], NamedSharding(mesh, _spec())
    )
    logits = logits.astype(jnp.float32)
    theirs = importlib.import_module("tpu_inference.layers.jax.sample.sampling")
    fits = theirs._distributed_sampling_fits
    if options is None or (allow_distributed_sampling and fits(mesh, logits.shape[1])):
        return tokens, logits
    assert drawn.cut is not None
    return tokens, _processed(logits, jax.tree.map(lambda x: x[:, 0], drawn.cut), sampling)


@partial(jax.jit, static_argnames="mesh")
def process_and_extend_logits(
    mesh: Mesh,
    target_logits: jax.Array,
    processed_bonus_logits: jax.Array,
    spec_decode_metadata: Any,
    tpu_sampling_metadata: Any,
) -> jax.Array:
    """The drafts' logits as they are drawn from, and those of bonus tokens: [N + B, V] float32.

    Args:
      target_logits: [N, V]; processed_bonus_logits: [B, V] float32, as `sample` returns them.
      spec_decode_metadata: whose `draft_lengths` [B] say which request's a row is.
      tpu_sampling_metadata: as `RejectionSampler.forward` has it.
    """
    data, _ = _axes(mesh, 1)

    def of_shard(logits: Any, bonus: Any, num: Any, options: Any) -> jax.Array:
        x = logits.astype(jnp.float32)
        if options is not None:
            owners = _owners(num, logits.shape[0])
            sampling = _sampling(_of_owners(options, owners))
            x = _processed(x, truncation(logits, sampling), sampling)
        return jnp.concatenate([x, bonus])

    by_data = _spec(data)
    extended: jax.Array = jax.shard_map(of_shard, mesh=mesh, in_specs=by_data, out_specs=by_data)(
        target_logits,
        processed_bonus_logits,
        spec_decode_metadata.draft_lengths,
        _options(tpu_sampling_metadata),
    )
    return extended


class Options(NamedTuple):
    """The parameters of requests, or of their drafts, in the words of `Sampling`."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


def axis_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of their meshes: those of data parallelism, and those that split the vocabulary."""
    names = importlib.import_module("tpu_inference.layers.common.sharding").ShardingAxisName
    data, columns = (
        (axes,) if isinstance(axes, str) else tuple(axes)
        for axes in (names.ATTN_DATA, names.MLP_TENSOR)
    )
    return data, tuple(axis for axis in columns if axis not in data)


def _axes(mesh: Mesh, vocab_size: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that there are in a mesh; none for a vocabulary that they do not divide.

    Nor those of one shard: a vocabulary that is whole is read faster where that is known.
    """
    data, columns = (
        tuple(axis for axis in axes if axis in mesh.axis_names) for axes in axis_names()
    )
    columns = tuple(axis for axis in columns if mesh.shape[axis] > 1)
    shards = math.prod(mesh.shape[axis] for axis in columns)
    return data, columns if vocab_size % shards == 0 else ()


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)


def _options(metadata: Any) -> Options | None:
    """The options [B] as `Sampling` has them; None where all requests are greedy."""
    if not metadata.do_sampling:
        return None
    temperature = metadata.temperature
    return Options(
        jnp.where(temperature < _GREEDY, 0, temperature),
        jnp.maximum(metadata.top_k, 0),
        metadata.top_p,
    )


def _sampling(options: Options, key: jax.Array | None = None) -> Sampling:
    number = options.temperature.size
    return Sampling.of(number, **options._asdict(), key=key)


def _owners(num: jax.Array, number: int) -> jax.Array:
    """The request of each of `number` drafts; B of padding."""
    places = jnp.arange(number, dtype=jnp.int32)
    return jnp.searchsorted(jnp.cumsum(num), places, side="right").astype(jnp.int32)


def _of_owners(options: Options, owners: jax.Array) -> Options:
    """The options of each draft's request."""
    return Options(*(x[jnp.minimum(owners, x.size - 1)] for x in options))


def _next_tokens(
    logits: jax.Array,
    probs: jax.Array | None,
    drafts: jax.Array,
    is_draft: jax.Array,
    sampling: Sampling | None,
    columns: tuple[str, ...],
) -> jax.Array:
    """The token that each row [N] makes of its draft: that draft, or what comes in its place.

    Each is a slot of its own, so that a request may have any number of drafts, and no array is as
    wide as the longest. A row of a certain draft is drawn from as if there was none. One with a q
    is verified, and its next row is missing. A refused draft is never drawn in its own place.

    sampling: None where all are greedy. Of padding, anything is returned.
    """
    number = drafts.size
    place = jnp.where(is_draft, jnp.arange(number, dtype=jnp.int32), -1)[:, None]
    proposals, row_ids = jnp.zeros((number, 0), jnp.int32), place
    q, num = None, jnp.zeros(number, jnp.int32)
    if probs is not None:
        proposals, num = drafts[:, None], jnp.ones(number, jnp.int32)
        q = DenseQ.of_probs(probs, jnp.maximum(place, 0))
        row_ids = jnp.concatenate([place, jnp.full_like(place, -1)], axis=1)
    verified = verify(
        logits,
        Drafts(proposals, num, q),
        Sampling.greedy(number) if sampling is None else sampling,
        jnp.zeros(number, jnp.int32),
        row_ids=row_ids,
        axis_name=columns,
        all_greedy=sampling is None,
    )
    return verified.token_ids[:, 0]


def _until_rejected(
    tokens: jax.Array, accepted: jax.Array, owners: jax.Array, num: jax.Array, bonus: jax.Array
) -> jax.Array:
    """The tokens [N] up to a request's first rejection; bonus tokens [B] where there is none."""
    rejections = jnp.pad(jnp.cumsum(~accepted, dtype=jnp.int32), (1, 0))  # before each draft
    ends = jnp.cumsum(num)
    before_request = rejections[ends - num]
    before = rejections[:-1] - before_request[jnp.minimum(owners, num.size - 1)]
    tokens = jnp.where((owners < num.size) & (before == 0), tokens, -1)
    return jnp.concatenate([tokens, jnp.where(rejections[ends] == before_request, bonus, -1)])


def _processed(logits: jax.Array, cut: Truncation, sampling: Sampling) -> jax.Array:
    """Logits [N, V] float32 as a row's token is drawn from them; a greedy row's are its own."""
    ids = jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.int32), logits.shape)
    sampled = (sampling.temperature > 0)[:, None]
    scale = jnp.where(sampled, sampling.temperature[:, None], 1)
    return jnp.where(sampled & ~cut.keeps(logits, ids), MASKED, logits / scale)
