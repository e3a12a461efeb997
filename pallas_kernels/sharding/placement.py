"""Whether a call's logits are sharded over the vocabulary, and the call on every shard if so."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.greedy_choice import greedy
from pallas_kernels.implementations import Implementation
from pallas_kernels.sharding import shards
from pallas_kernels.sharding.vocab_shard import VocabShard
from pallas_kernels.types import TopkLogprobs

# Of `shards.topk_logprobs`, but for the static ones. Without token_ids: the greedy choice.
Arguments = tuple[jax.Array | None, ...]
AnyMesh = Mesh | AbstractMesh  # the latter where a traced array tells


class Place(NamedTuple):
    """Where a call's logits are."""

    mesh: AnyMesh | None  # outside `shard_map`, the one that splits their vocabulary
    shard: VocabShard
    vocab_size: int  # V

    @property
    def axis_name(self) -> str | None:
        return self.shard.axis_name


def placed(
    logits: jax.Array, axis_name: str | None, mesh: Mesh | None, vocab_size: int | None
) -> Place:
    """Where the logits are, from what the caller says and the array tells.

    Raises:
      ValueError: a mesh without an axis, an axis that does not exist, columns that do not divide.
    """
    if mesh is not None and axis_name is None:
        raise ValueError(f"mesh {mesh.shape} without axis_name; name the vocabulary's axis")
    found: AnyMesh | None = mesh
    if mesh is None and axis_name is None:
        found, axis_name = _sharding_of(logits)
    shard = VocabShard(axis_name, vocab_size)
    width = logits.shape[1]
    if found is None:
        try:
            return Place(None, shard, shard.size(width))
        except NameError:
            raise ValueError(
                f"axis_name = {axis_name!r} is no axis of a shard_map around this call; outside "
                "one, pass mesh too"
            ) from None
    if axis_name not in found.shape:
        raise ValueError(f"axis_name = {axis_name!r} is not an axis of the mesh {found.shape}")
    if width % found.shape[axis_name]:
        raise ValueError(
            f"{width} columns do not divide into the {found.shape[axis_name]} shards of "
            f"{axis_name!r}; pad them and pass vocab_size = {width}"
        )
    return Place(found, shard, VocabShard(None, vocab_size).size(width))


def _sharding_of(logits: jax.Array) -> tuple[AnyMesh | None, str | None]:
    """The mesh and the axis that split the logits' columns; neither where none does."""
    is_traced = isinstance(logits, jax.core.Tracer)
    sharding = jax.typeof(logits).sharding if is_traced else logits.sharding
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < 2:
        return None, None
    axis = sharding.spec[1]
    names = axis if isinstance(axis, tuple) else (axis,)
    if len(names) > 1:
        raise ValueError(f"the vocabulary is split over {names}; one mesh axis can be used")
    return (sharding.mesh, axis if isinstance(axis, str) else names[0]) if axis else (None, None)


def run(
    place: Place, implementation: Implementation | None, k: int, arguments: Arguments
) -> TopkLogprobs:
    """`topk_logprobs` of the arguments (logits, token_ids or None for the greedy choice, ...)."""
    if place.mesh is None:
        return _local(place.shard, implementation, k)(*arguments)
    return _mapped(place.mesh, place.shard, implementation, k)(*arguments)


@functools.cache
def _mapped(
    mesh: AnyMesh, shard: VocabShard, implementation: Implementation | None, k: int
) -> Callable[..., TopkLogprobs]:
    """The call on every shard; the mesh's other axes are left as they are."""
    whole, columns = PartitionSpec(), PartitionSpec(None, shard.axis_name)  # type: ignore[no-untyped-call]
    mapped: Callable[..., TopkLogprobs] = jax.jit(
        jax.shard_map(
            _local(shard, implementation, k),
            mesh=mesh,
            in_specs=(columns, *[whole] * 5),
            out_specs=whole,
            axis_names={shard.axis_name},
        )
    )
    return mapped


def _local(
    shard: VocabShard, implementation: Implementation | None, k: int
) -> Callable[..., TopkLogprobs]:
    """The call on one shard, as a function of `Arguments`."""

    def call(logits: jax.Array, token_ids: jax.Array | None, *rest: Any) -> TopkLogprobs:
        if token_ids is None:
            token_ids = greedy(
                logits, axis_name=shard.axis_name, vocab_size=shard.vocab_size
            ).token_ids
        return shards.topk_logprobs(shard, implementation, logits, token_ids, k, *rest)

    return call
