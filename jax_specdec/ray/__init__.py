"""The door to many nodes: engines as actors of Ray, requests in, batches of columns out.

It stands above `jax_specdec.engine` and `jax_specdec.export`; the modules behind it may change. Ray
itself is imported when the first engine is made: without it, that says what to install.
"""

import jax_specdec.beside.ipc  # noqa: F401
from jax_specdec.ray.batch import ColumnBatch, Part, columns
from jax_specdec.ray.config import RayConfig
from jax_specdec.ray.errors import ClusterError
from jax_specdec.ray.ray_engine import RayEngine
from jax_specdec.ray.replica_types import ReplicaStatus

__all__ = [
    "RayEngine",
    "RayConfig",
    "ColumnBatch",
    "Part",
    "columns",
    "ReplicaStatus",
    "ClusterError",
]
