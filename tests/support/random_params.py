"""Random weights from NumPy: compiling jax's random bits would take seconds."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.device.model.params import init_params


def drawn(config, draw):
    """Weights with the shapes and dtypes of `init_params`, of which `draw` makes each, by name."""

    def leaf(path, like):
        return jnp.asarray(draw(path[-1].name, like.shape).astype(like.dtype))

    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree_util.tree_map_with_path(leaf, shapes)


def random_params(config, seed=0):
    """Weights with the variances of `init_params`."""
    rng = np.random.default_rng(seed)

    def draw(name, shape):
        if "norm" in name or "bias" in name:
            return np.full(shape, "norm" in name)
        fan_in = shape[-2] if name != "embedding" else shape[-1]
        if name in ("output", "down"):  # they write into the residual stream
            fan_in *= 2 * config.num_layers
        return rng.standard_normal(shape) / fan_in**0.5

    return drawn(config, draw)
