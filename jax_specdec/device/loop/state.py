"""The state of the decoding loop on the device: admission, release, copies of a prefix.

Axes: B slots, S = D + 1 positions, D drafts, T tokens of a slot, N stop ids, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import Drafter
from jax_specdec.device.model.own_model import Model, empty_cache
from jax_specdec.device.model.params import KVCache
from jax_specdec.device.model.sequences import digest_of
from jax_specdec.device.model.sharding import ONE_DEVICE, Parallel, split
from pallas_kernels.sampling import Drafts, Sampling

_AnyArray = jax.Array | np.ndarray

MAX_STOP_IDS = 8  # N: stop token ids of a request that the device watches for


@dataclass(frozen=True)
class LoopConfig:
    """The static part of a loop; hashable."""

    model: Model  # the decoder that comes along, or an `OwnModel`
    drafter: Drafter
    num_slots: int  # B
    max_length: int  # T: prompt and emitted tokens of a request
    accept: Callable[..., jax.Array] | None = None  # the rule of acceptance; None: `verify`'s own
    parallel: Parallel = ONE_DEVICE
    implementation: str | None = None  # of `pallas_kernels.use_implementation`
    prefill_only: bool = False  # a request ends here with its first token, and is handed over

    def __post_init__(self) -> None:
        if self.parallel.mesh is not None and not isinstance(self.model, ModelConfig):
            raise ValueError(
                f"{type(self.model).__name__} is a model of your own, which runs on one device: "
                "leave `parallel` out"
            )

    @property
    def digest(self) -> int:
        """Of what a row's bits depend on; 0 where they depend on the batch, too."""
        return digest_of(self.model, self.parallel.mesh, self.implementation)

    @property
    def num_positions(self) -> int:
        """S: rows of a slot in a step."""
        return self.drafter.num_drafts + 1


class LoopState(NamedTuple):
    """Everything that a step reads and changes.

    The last known token of a slot, at `lengths - 1`, is not in the cache yet: it is row 0 of the
    slot's next step.
    """

    cache: Annotated[KVCache, "T = C"]  # C is T, or whole tiles of it
    drafter: Any  # the drafter's own state
    drafts: Drafts
    handed_over: Int32[Array, "B _"]  # the drafts of a slot's first step; -1 where there are none
    certain: Bool[Array, " B"]  # the drafts are those, and were drawn from no known q
    tokens: Int32[Array, "B T"]  # prompt and emitted tokens
    lengths: Int32[Array, " B"]  # known tokens
    active: Bool[Array, " B"]  # decoding
    prefilling: Bool[Array, " B"]  # admitted, prompt not yet through
    remaining: Int32[Array, " B"]  # tokens that may still be emitted
    max_drafts: Int32[Array, " B"]
    stop_ids: Int32[Array, "B N"]  # -1 where unused
    sampling: Sampling


class Admission(NamedTuple):
    """One request, as arrays of the host; `requests` holds the meaning of each value."""

    tokens: Int32[_AnyArray, " T"]  # the prompt, padded
    length: Int32[_AnyArray, ""]
    max_tokens: Int32[_AnyArray, ""]
    max_drafts: Int32[_AnyArray, ""]
    stop_ids: Int32[_AnyArray, " N"]  # -1 where unused
    sampling: Annotated[Sampling, "B = 1"]
    draft_token_ids: Int32[_AnyArray, " D"]  # handed over, for the first step; then -1


def init_state(config: LoopConfig) -> LoopState:
    """B empty slots."""
    batch, length = config.num_slots, config.max_length
    drafts, drafter = config.drafter.init(batch, length)
    cache = empty_cache(config.model, batch, length)
    distinct = _empty_slots(cache, drafter, drafts, length)
    placed: LoopState = config.parallel.place(
        distinct, state_specs(distinct, config.parallel.num_shards)
    )
    return placed


@functools.partial(jax.jit, static_argnames="length")
def _empty_slots(
    cache: Annotated[KVCache, "T = C"], drafter: Any, drafts: Drafts, length: int
) -> LoopState:
    """The state around caches, drafter and drafts that are empty, of B slots of T positions.

    It is one program: a worker would compile one for each array, at every start. No two leaves
    share a buffer, because the state is donated to the next step.
    """
    batch = drafts.num.shape[0]
    state = LoopState(
        cache=cache,
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
    copied: LoopState = jax.tree.map(jnp.copy, state)
    return copied


def state_shardings(config: LoopConfig) -> Any:
    """The place of each array of the state, as a tree like it; None on one device."""
    if config.parallel.mesh is None:
        return None
    state = jax.eval_shape(lambda: init_state(replace(config, parallel=ONE_DEVICE)))
    places = config.parallel.shardings(state_specs(state, config.parallel.num_shards))
    # One for all arrays of the drafts: which they have depends on what their message is to tell.
    return places._replace(drafts=config.parallel.everywhere)


def state_specs(state: Any, num_shards: int) -> Any:
    """How a state is split among devices: caches by heads; the rest is on all of them.

    Args:
      state: a `LoopState` of arrays or of their shapes.
      num_shards: devices.

    Returns:
      A tree of `PartitionSpec` like the state.
    """

    def specs_of(x: Any) -> Any:
        axis = -2 if isinstance(x, KVCache) else None  # of [L, B, T, KVH, Dh]
        return jax.tree.map(lambda leaf: split(leaf.shape, axis, num_shards), x)

    specs: Any = jax.tree.map(specs_of, state, is_leaf=lambda x: isinstance(x, KVCache))
    return specs


def start_slot(state: LoopState, slot: Int32[Array, ""], request: Admission) -> LoopState:
    """Put `request` into `slot`, in place of what was there before.

    Its prompt still has to be run.
    """

    def put(slot_array: jax.Array, value: _AnyArray) -> jax.Array:
        return slot_array.at[slot].set(value)

    return state._replace(
        handed_over=put(state.handed_over, request.draft_token_ids),
        tokens=put(state.tokens, request.tokens),
        lengths=put(state.lengths, request.length),
        active=state.active.at[slot].set(False),
        prefilling=state.prefilling.at[slot].set(True),
        remaining=put(state.remaining, request.max_tokens),
        max_drafts=put(state.max_drafts, request.max_drafts),
        stop_ids=put(state.stop_ids, request.stop_ids),
        sampling=jax.tree.map(
            lambda x, values: put(x, values[0]), state.sampling, request.sampling
        ),
    )


def with_report(state: LoopState, report: Any) -> LoopState:
    """The state with another report on its drafts.

    A report has the widths of a batch. Programs that only pass it on are called without it, so
    that they are not compiled for each.
    """
    return state._replace(drafts=state.drafts._replace(report=report))


def stop_slot(state: LoopState, slot: Int32[Array, ""]) -> LoopState:
    """Stop the request in `slot`."""
    return state._replace(
        active=state.active.at[slot].set(False),
        prefilling=state.prefilling.at[slot].set(False),
    )


def start_again(state: LoopState) -> LoopState:
    """Let every request that runs run its tokens again, the emitted ones too: caches are void.

    The drafts of a slot that has begun go with its caches. Random numbers are keyed by position, so
    nothing else of a request changes.
    """
    return state._replace(
        handed_over=jnp.where(state.active[:, None], -1, state.handed_over),
        active=jnp.zeros_like(state.active),
        prefilling=state.active | state.prefilling,
    )


def copy_prefix(state: LoopState, source: Int32[Array, ""], slot: Int32[Array, ""]) -> LoopState:
    """Copy the caches of slot `source` to `slot`, those of the drafter too.

    For a prompt that begins as that of `source` and is not through yet. All T positions are copied:
    less than a prefill chunk moves, and no shape depends on how much is of use. Entries beyond
    that are overwritten before a row sees them; see `llama.forward`.
    """

    def copy(x: jax.Array) -> jax.Array:  # [L, B, T, KVH, Dh]
        return x.at[:, slot].set(x[:, source])

    def copied(x: Any) -> Any:
        return jax.tree.map(copy, x) if isinstance(x, KVCache) else x

    cache, drafter = jax.tree.map(
        copied, (state.cache, state.drafter), is_leaf=lambda x: isinstance(x, KVCache)
    )
    return state._replace(cache=cache, drafter=drafter)
