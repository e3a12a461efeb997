"""NVIDIA's GPUs, as compilers and the model of the kernels' time have to know them.

The numbers of A100, H100, H200, B200 and B300 are those of XLA's own descriptions of them
(`xla/backends/gpu/target_config/specs`), of the other cards NVIDIA's data sheets and white papers.
Clocks under load are assumed. Nothing here was measured.
"""

from typing import NamedTuple

LARGE_SHARED, SMALL_SHARED = (233_472, 232_448), (102_400, 101_376)


class Gpu(NamedTuple):
    """One card."""

    name: str  # as its driver says it
    capability: tuple[int, int]
    multiprocessors: int
    clock_ghz: float  # at most
    busy_ghz: float  # assumed while a large call runs
    bandwidth: float  # of the memory, bytes a second
    cache: int  # of the second level, bytes
    memory: int  # bytes
    shared: tuple[int, int] = LARGE_SHARED  # bytes of a multiprocessor, and what a CTA may have
    threads: int = 2048  # of a multiprocessor
    fma_lanes: int = 128  # float32 operations that a multiprocessor starts in a clock

    @property
    def target(self) -> str:
        """XLA's description of a chip, as text of its GpuTargetConfigProto.

        From 9.0 on with the instructions of this very architecture (sm_90a), as on the card itself.
        """
        major, minor = self.capability
        extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  fpus_per_core: {self.fma_lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {self.shared[0]} shared_memory_per_block_optin: {self.shared[1]}
  threads_per_core_limit: {self.threads} core_count: {self.multiprocessors}
  memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


GPUS = {
    "A100": Gpu(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, 1.41, 2.03904e12, 40 << 20, 85_100_068_864,
        (167_936, 166_912), fma_lanes=64,
    ),
    "L40S": Gpu(
        "NVIDIA L40S", (8, 9), 142, 2.52, 2.4, 864e9, 96 << 20, 45 << 30, SMALL_SHARED, 1536,
    ),
    "RTX4090": Gpu(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, 2.5, 1.008e12, 72 << 20, 24 << 30,
        SMALL_SHARED, 1536,
    ),
    "H100": Gpu(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, 1.755, 3.35232e12, 52_428_800, 84_942_979_072,
    ),
    "H200": Gpu(
        "NVIDIA H200 141GB HBM3e", (9, 0), 132, 1.98, 1.755, 4.8e12, 52_428_800, 151_397_597_184,
    ),
    "B200": Gpu(
        "NVIDIA B200", (10, 0), 148, 1.965, 1.85, 7.67232e12, 132_644_864, 191_514_411_008,
    ),
    "B300": Gpu(
        "NVIDIA B300", (10, 3), 158, 1.965, 1.85, 7.936e12, 135_528_448, 297_021_865_984,
    ),
    "RTX5090": Gpu(
        "NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, 2.4, 1.792e12, 96 << 20, 34_190_458_880,
        SMALL_SHARED, 1536,
    ),
}  # fmt: skip
