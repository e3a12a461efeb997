"""Random weights from NumPy: compiling jax's random bits would take seconds."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.device.model.params import init_params


def random_params(config, seed=0):
    """Weights with the shapes, dtypes and variances of `init_params`."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def leaf(path, like):
        name = path[-1].name
        if "norm" in name or "bias" in name:
            return jnp.asarray(np.full(like.shape, "norm" in name, like.dtype))
        fan_in = like.shape[-2] if name != "embedding" else like.shape[-1]
        if name in ("output", "down"):  # they write into the residual stream
            fan_in *= 2 * config.num_layers
        return jnp.asarray((rng.standard_normal(like.shape) / fan_in**0.5).astype(like.dtype))

    return jax.tree_util.tree_map_with_path(leaf, shapes)
