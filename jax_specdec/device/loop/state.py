"""The state of the decoding loop on the device, and who is in its slots.

Axes: B slots, S = D + 1 positions, D drafts, T tokens of a slot, V vocabulary.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import Drafter
from jax_specdec.device.model.params import KVCache, init_cache
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel, split
from jax_specdec.device.sampling.distribution import Sampling
from jax_specdec.device.sampling.verify import AcceptRule, Drafts, accept_draft

MAX_STOP_IDS = 8  # stop token ids of a request that the device watches for


@dataclass(frozen=True)
class LoopConfig:
    """The static part of a loop; hashable."""

    model: ModelConfig
    drafter: Drafter
    num_slots: int  # B
    max_length: int  # T: prompt and emitted tokens of a request
    accept: AcceptRule = accept_draft
    parallel: Parallel = ONE_DEVICE
    prefill_only: bool = False  # a request ends here with its first token, and is handed over

    @property
    def num_positions(self) -> int:
        return self.drafter.num_drafts + 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopState:
    """Everything that a step reads and changes.

    The last known token of a slot, at `lengths - 1`, is not in the cache yet: it is row 0 of the
    slot's next step.
    """

    cache: KVCache
    drafter: Any
    drafts: Drafts
    handed_over: jax.Array  # [B, D] int32: the drafts of a slot's first step; -1 where none
    certain: jax.Array  # [B] bool: the drafts are those, and were drawn from no known logits
    tokens: jax.Array  # [B, T] int32: prompt and emitted tokens
    lengths: jax.Array  # [B] int32: known tokens
    active: jax.Array  # [B] bool: decoding
    prefilling: jax.Array  # [B] bool: admitted, prompt not yet through
    remaining: jax.Array  # [B] int32: tokens that may still be emitted
    max_drafts: jax.Array  # [B] int32
    stop_ids: jax.Array  # [B, MAX_STOP_IDS] int32, -1 where unused
    sampling: Sampling


class Admission(NamedTuple):
    """One request, as arrays; `requests` holds the meaning of each value."""

    tokens: jax.Array  # [T] int32: the prompt, padded
    length: jax.Array  # [] int32
    max_tokens: jax.Array  # [] int32
    max_drafts: jax.Array  # [] int32
    stop_ids: jax.Array  # [MAX_STOP_IDS] int32, -1 where unused
    sampling: Sampling  # of scalars
    draft_token_ids: jax.Array  # [D] int32: handed over, for the first step; then -1


def init_state(config: LoopConfig) -> LoopState:
    """B empty slots."""
    batch, length = config.num_slots, config.max_length
    drafts, drafter = config.drafter.init(batch, length)
    state = LoopState(
        cache=init_cache(config.model, batch, length),
        drafter=drafter,
        drafts=drafts,
        handed_over=jnp.full_like(drafts.token_ids, -1),
        certain=jnp.zeros(batch, bool),
        tokens=jnp.zeros((batch, length), jnp.int32),
        lengths=jnp.zeros(batch, jnp.int32),
        active=jnp.zeros(batch, bool),
        prefilling=jnp.zeros(batch, bool),
        remaining=jnp.zeros(batch, jnp.int32),
        max_drafts=jnp.zeros(batch, jnp.int32),
        stop_ids=jnp.full((batch, MAX_STOP_IDS), -1, jnp.int32),
        sampling=Sampling.greedy(batch),
    )
    # No two leaves may share a buffer: the state is donated to the next step.
    distinct: LoopState = jax.tree.map(jnp.copy, state)
    placed: LoopState = config.parallel.place(
        distinct, state_specs(distinct, config.parallel.num_shards)
    )
    return placed


def state_shardings(config: LoopConfig) -> LoopState | None:
    """Where each array of the state is; None: on the one device."""
    if config.parallel.mesh is None:
        return None
    state = jax.eval_shape(lambda: init_state(replace(config, parallel=ONE_DEVICE)))
    shardings: LoopState = config.parallel.shardings(state_specs(state, config.parallel.num_shards))
    return shardings


def state_specs(state: LoopState, num_shards: int) -> Any:
    """How a state is split among devices, as a tree like it: caches by heads, logits by tokens."""

    def of(x: Any) -> Any:
        axis = -2 if isinstance(x, KVCache) else None  # of [L, B, T, KVH, Dh]
        return jax.tree.map(lambda leaf: split(leaf.shape, axis, num_shards), x)

    specs = jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, KVCache))
    if state.drafts.logits is None:
        return specs
    of_logits = split(state.drafts.logits.shape, -1, num_shards)  # [B, D, V]
    return replace(specs, drafts=specs.drafts._replace(logits=of_logits))


def admit(state: LoopState, slot: jax.Array, request: Admission) -> LoopState:
    """Put `request` into `slot` ([] int32), whatever was there before.

    Its prompt still has to be run.
    """

    def put(whole: jax.Array, one: jax.Array) -> jax.Array:
        return whole.at[slot].set(one)

    return replace(
        state,
        handed_over=put(state.handed_over, request.draft_token_ids),
        tokens=put(state.tokens, request.tokens),
        lengths=put(state.lengths, request.length),
        active=state.active.at[slot].set(False),
        prefilling=state.prefilling.at[slot].set(True),
        remaining=put(state.remaining, request.max_tokens),
        max_drafts=put(state.max_drafts, request.max_drafts),
        stop_ids=put(state.stop_ids, request.stop_ids),
        sampling=jax.tree.map(put, state.sampling, request.sampling),
    )


def release(state: LoopState, slot: jax.Array) -> LoopState:
    """Stop whatever runs in `slot` ([] int32)."""
    return replace(
        state,
        active=state.active.at[slot].set(False),
        prefilling=state.prefilling.at[slot].set(False),
    )


def copy_prefix(state: LoopState, source: jax.Array, slot: jax.Array) -> LoopState:
    """Copy the caches of slot `source` to `slot` (both [] int32), the drafter's ones too.

    For a prompt that begins as that of `source` and is not through yet. All T positions are copied:
    less than a prefill chunk moves, and no shape depends on how much is of use. The others are
    overwritten before they are seen; see `model.forward`.
    """

    def copy(x: jax.Array) -> jax.Array:  # [L, B, T, KVH, Dh]
        return x.at[:, slot].set(x[:, source])

    def of(x: Any) -> Any:
        return jax.tree.map(copy, x) if isinstance(x, KVCache) else x

    is_cache = {"is_leaf": lambda x: isinstance(x, KVCache)}
    return replace(
        state, cache=of(state.cache), drafter=jax.tree.map(of, state.drafter, **is_cache)
    )
