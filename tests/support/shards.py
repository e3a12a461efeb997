"""Arrays cut into vocabulary shards over the CPU devices of a test process."""

import jax
import numpy as np

from pallas_kernels.sharding.vocab_shard import VocabShard

P = jax.sharding.PartitionSpec
# For programs that run a few times, or never: the machine code need not be good. A third of the
# compiler's time.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}


def mesh_of(shards):
    """A mesh axis "model" of so many devices."""
    return jax.make_mesh(
        (shards,),
        ("model",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:shards],
    )


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
        lambda part: call(part, shard),
        mesh=mesh_of(shards),
        in_specs=in_spec,
        out_specs=out_specs,
    )
    return jax.jit(mapped, compiler_options=QUICK)(padded(np.asarray(x), shards))
