"""Ahead-of-time compilation for a GPU of `chips.GPUS` on a machine without one.

For measurements and tests; no call of the kernels imports it. Needs the `aot` extra, no driver.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core, utils
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.backends.mosaic_gpu import limits
from pallas_kernels.testing.chips import GPUS

# How Mosaic GPU is told where to write what it compiles, and to write the host's code too: there is
# no other way.
DUMP, HOST_CODE = "MOSAIC_GPU_DUMP_TO", "MOSAIC_GPU_DUMP_HOST_LLVM"


class CompileTarget(NamedTuple):
    """A device that programs are lowered for, and where Mosaic GPU leaves their kernels."""

    sharding: NamedSharding
    dump: Path  # NAME_*.ptx and the host's LLVM, NAME_*.ll, of every kernel compiled last

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An argument's type, for `jax.jit(...).lower`."""
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=self.sharding)

    def compile(self, lowered: Any) -> Any:
        """The compiled program; afterwards `dump` holds its new kernels and no others.

        A kernel that this process compiled before is not compiled again, and so not in `dump`.
        """
        for old in self.dump.iterdir():
            old.unlink()
        # Not while a program is lowered: jax from 0.11 on would write down what its inference of
        # layouts solves, which takes ten times as long as to solve it.
        with mock.patch.dict(os.environ, {DUMP: str(self.dump), HOST_CODE: "1"}):
            return lowered.compile()


def find(chip: str = "H100") -> CompileTarget:
    """The H100, or another of `GPUS`, for this process from now on: jax looks for no other GPU.

    Call it before any array is made.

    Raises:
      ValueError: this jax cannot compile the kernels for it: it would end the process.
    """
    major, minor = GPUS[chip].capability
    if (obstacle := limits.capability_obstacle(float(f"{major}.{minor}"))) is not None:
        raise ValueError(f"{chip}: {obstacle}")
    jax.config.update("jax_platforms", "cpu")
    dump = Path(tempfile.mkdtemp(prefix=f"{chip}-kernels-"))
    _lower_for(GPUS[chip].capability)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[chip].target, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    return CompileTarget(NamedSharding(mesh, PartitionSpec()), dump)


def _lower_for(capability: tuple[int, int]) -> None:
    """Have kernels lowered as on a host with such a GPU, by the backend and by Mosaic GPU.

    Without a device it takes 9.0 for granted, whatever XLA compiles for: a B200's kernels would be
    others than on a B200, and an A100's would end the process in LLVM.
    """
    module: Any = utils if hasattr(utils, "_infer_arch") else core  # from jax 0.11 on; before
    module._infer_arch = lambda: capability
    limits.cuda_capability = lambda: float("{}.{}".format(*capability))
