"""One model over several devices: which device holds what, and calls on vocabulary shards.

Tensor parallelism by JAX's own means. The matrices of a layer are split by heads and by
feed-forward columns, and XLA's partitioner adds the two sums a layer that this needs. Embedding and
output head are split by token ids, so every device makes the logits of its own tokens; what reads
logits runs under `jax.shard_map` on these shards, and no logits travel.

Source of the split: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jax_specdec.model_config import ModelConfig
from jax_specdec.model_params import KVCache, named_arrays
from pallas_kernels.vocab_shard import WHOLE, VocabShard

MODEL_AXIS = "model"

Result = TypeVar("Result")

# The axis of each weight that is split, from its end; all others are on every device.
SPLIT_AXES = {
    "embedding": -2,  # [V, D]
    "head": -1,  # [D, V]
    "query": -1, "key": -1, "value": -1,  # [L, D, heads * Dh]
    "query_bias": -1, "key_bias": -1, "value_bias": -1,  # [L, heads * Dh]
    "output": -2,  # [L, heads * Dh, D]
    "gate": -1, "up": -1,  # [L, D, F]
    "down": -2,  # [L, F, D]
}  # fmt: skip


@dataclass(frozen=True)
class Parallel:
    """Over which devices a model is spread. Hashable; by default one device has everything."""

    mesh: Mesh | None = None  # with one axis, MODEL_AXIS

    @property
    def axis_name(self) -> str | None:
        return None if self.mesh is None else MODEL_AXIS

    @property
    def num_shards(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def over_vocabulary(
        self, call: Callable[[VocabShard, Any, Any], Result], columns: Any, whole: Any
    ) -> Result:
        """`call(shard, columns, whole)`, on each device with its own columns.

        Args:
          call: its result must be the same on every shard.
          columns: arrays [..., V]; a device gets [..., V / shards].
          whole: arrays that every device gets whole.
        """
        if self.mesh is None:
            return call(WHOLE, columns, whole)
        shard = VocabShard(MODEL_AXIS)
        specs = jax.tree.map(lambda x: _spec(x.ndim, -1), columns)
        mapped: Callable[[Any, Any], Result] = jax.shard_map(
            lambda columns, whole: call(shard, columns, whole),
            mesh=self.mesh,
            in_specs=(specs, _spec(0, None)),
            out_specs=_spec(0, None),
        )
        return mapped(columns, whole)

    def place(self, values: Any, specs: Any) -> Any:
        """The values, put where the specs say; they are left alone on one device."""
        if self.mesh is None:
            return values
        return jax.device_put(values, self.shardings(specs))

    def keep(self, values: Any, specs: Any) -> Any:
        """The values of a traced computation, kept where the specs say."""
        if self.mesh is None:
            return values
        return lax.with_sharding_constraint(values, self.shardings(specs))  # type: ignore[no-untyped-call]

    def shardings(self, specs: Any) -> Any:
        """The specs as shardings of the mesh."""
        assert self.mesh is not None
        mesh = self.mesh
        is_spec = {"is_leaf": lambda x: isinstance(x, PartitionSpec)}
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, **is_spec)


ONE_DEVICE = Parallel()


def tensor_parallel(
    config: ModelConfig, count: int, devices: Sequence[jax.Device] | None = None
) -> Parallel:
    """A model over `count` devices.

    Args:
      config: of the model; heads, feed-forward columns and vocabulary must divide evenly.
      count: 1 for one device.
      devices: to take the first ones of; None: all that JAX knows.

    Raises:
      ValueError: too few devices, or a size that does not divide.
    """
    if count == 1:
        return ONE_DEVICE
    devices = jax.devices() if devices is None else devices
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"tensor parallelism over {count} devices, but there are {len(devices)}; on a CPU, "
            "XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of them"
        )
    for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
        if getattr(config, name) % count:
            raise ValueError(
                f"{name} = {getattr(config, name)} does not divide among {count} devices: choose a "
                "divisor"
            )
    return Parallel(Mesh(np.array(devices[:count]), (MODEL_AXIS,), axis_types=(AxisType.Auto,)))


def params_specs(params: Any) -> Any:
    """How the weights are split: a tree of `PartitionSpec` like `params`."""
    specs = {
        name: _spec(value.ndim, SPLIT_AXES.get(name.rpartition(".")[2]))
        for name, value in named_arrays(params).items()
    }
    return jax.tree.unflatten(jax.tree.structure(params), list(specs.values()))


def state_specs(state: Any, vocab_size: int) -> Any:
    """How a loop's state is split: caches by heads, drafts' logits by tokens, the rest nowhere."""

    def of(x: Any) -> Any:
        if isinstance(x, KVCache):
            return jax.tree.map(lambda x: _spec(x.ndim, -2), x)  # [L, B, T, KVH, Dh]
        is_logits = x.ndim == 3 and x.shape[-1] == vocab_size  # [B, D, V]
        return _spec(x.ndim, -1 if is_logits else None)

    return jax.tree.map(of, state, is_leaf=lambda x: isinstance(x, KVCache))


def _spec(ndim: int, axis: int | None) -> PartitionSpec:
    """`axis`, counted from the end, over MODEL_AXIS; None: nothing is split."""
    if axis is None:
        return PartitionSpec()  # type: ignore[no-untyped-call]
    names = [None] * ndim
    names[axis] = MODEL_AXIS  # type: ignore[call-overload]
    return PartitionSpec(*names)  # type: ignore[no-untyped-call]
