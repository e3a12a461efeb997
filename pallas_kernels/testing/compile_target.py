"""Ahead-of-time compilation for an H100 on a machine without one.

For measurements and tests; no call of the kernels imports it. Needs the `aot` extra, no driver.
"""

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

# What XLA must know about a chip: NVIDIA's data sheets of the H100 SXM, the B200 and the RTX 5090,
# deviceQuery.
COMMON = """
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
"""
LARGE = f"""{COMMON}
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
"""
CHIPS = {
    "H100": f"""
gpu_device_info {{ {LARGE}
  core_count: 132 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA H100 80GB HBM3"
""",
    "B200": f"""
gpu_device_info {{ {LARGE}
  core_count: 148 memory_bandwidth: 8000000000000 l2_cache_size: 132644864 clock_rate_ghz: 1.965
  device_memory_size: 191497240576
  cuda_compute_capability {{ major: 10 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA B200"
""",
    "RTX5090": f"""
gpu_device_info {{ {COMMON}
  shared_memory_per_core: 102400 shared_memory_per_block_optin: 101376 threads_per_core_limit: 1536
  core_count: 170 memory_bandwidth: 1792000000000 l2_cache_size: 100663296 clock_rate_ghz: 2.407
  device_memory_size: 34190458880
  cuda_compute_capability {{ major: 12 feature_extension: ACCELERATED_FEATURES }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA GeForce RTX 5090"
""",
}


class CompileTarget(NamedTuple):
    """What programs are lowered for, and where Mosaic GPU leaves their kernels."""

    sharding: NamedSharding
    dump: Path  # NAME_*.ptx and the host's LLVM, NAME_*.ll, of every kernel compiled last

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An argument's type, for `jax.jit(...).lower`."""
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=self.sharding)  # type: ignore[no-untyped-call]

    def compile(self, lowered: Any) -> Any:
        """The compiled program; afterwards `dump` holds its new kernels and no others.

        A kernel that this process compiled before is not compiled again, and so not in `dump`.
        """
        for old in self.dump.iterdir():
            old.unlink()
        return lowered.compile()


def find(chip: str = "H100") -> CompileTarget:
    """The H100, or another of `CHIPS`, for this process from now on: jax looks for no other GPU.

    Call it before any array is made. Mosaic GPU is told by environment variables, which are the
    only way, where to write.
    """
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    dump = Path(tempfile.mkdtemp(prefix="h100-kernels-"))
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    os.environ["MOSAIC_GPU_DUMP_HOST_LLVM"] = "1"
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=CHIPS[chip], topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    return CompileTarget(NamedSharding(mesh, PartitionSpec()), dump)  # type: ignore[no-untyped-call]
