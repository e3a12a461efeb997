"""Every difference between the supported jax versions (0.10.2 to 0.12), in one place."""

import jax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which x differs between devices inside `shard_map`; empty elsewhere."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)
