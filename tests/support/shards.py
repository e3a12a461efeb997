"""Arrays cut into vocabulary shards over the CPU devices of a test process."""

import math

import jax
import numpy as np

from pallas_kernels.meshes.placement import VocabShard
from tests.support import quick_compile

P = jax.sharding.PartitionSpec


def automatic(**sizes):
    """A mesh of so many devices an axis, by name."""
    kinds, devices = (jax.sharding.AxisType.Auto,) * len(sizes), jax.devices()
    shape = tuple(sizes.values())
    return jax.make_mesh(shape, tuple(sizes), kinds, devices=devices[: math.prod(shape)])


def mesh_of(shards):
    """A mesh axis "model" of so many devices."""
    return automatic(model=shards)


def users_mesh(kind):
    """Axes "data" and "model" of 2 x 4 devices, as a user has them."""
    kinds = {"explicit": jax.sharding.AxisType.Explicit, "automatic": jax.sharding.AxisType.Auto}
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kinds[kind],) * 2)


def padded(x, shards):
    """x [..., V] with NaN in padding columns, so that the shards are equally wide."""
    vocab = x.shape[-1]
    padding = -(-vocab // shards) * shards - vocab
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)], constant_values=np.nan)


def on_shards(call, shards, x, vocab, out_specs):
    """`call(local columns of x, shard)` on every shard of x [..., V], jitted."""
    shard = VocabShard("model", vocab)
    in_spec = P(*[None] * (x.ndim - 1), "model")
    mapped = jax.shard_map(
        lambda part: call(part, shard), mesh=mesh_of(shards), in_specs=in_spec, out_specs=out_specs
    )
    return jax.jit(mapped, compiler_options=quick_compile.OPTIONS)(padded(np.asarray(x), shards))
