"""Which row a program of the GPU kernels serves, and at which temperature, in both passes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backends.mosaic_gpu.compat import asarray
from pallas_kernels.backends.mosaic_gpu.early import load_at_once

LOG2_E = 1.4426950408889634
LARGEST = 3.4028234663852886e38  # float32


class Targets(NamedTuple):
    """R target rows: arrays outside a kernel, references to them inside.

    None takes its default in the kernel: XLA would have to fill an array first, in a kernel of its
    own.
    """

    row_ids: Any  # [R] int32, a row of logits each; outside [0, N) the target row is skipped
    num_rows: Any  # [1] int32; target rows from there on are skipped
    temperatures: Any  # [R] float32, as the caller of `pallas_kernels.topk_logprobs` gave them

    def row(self, target: Any) -> Any:
        """The row of logits, in a kernel."""
        return target if self.row_ids is None else self.row_ids[target]

    def wanted(self, target: Any, row: Any, num_logits_rows: int) -> Any:
        """Whether the target row is not skipped, in a kernel."""
        inside = (row >= 0) & (row < num_logits_rows)
        return inside if self.num_rows is None else inside & (target < self.num_rows[0])

    def temperature(self, target: Any, interpreted: bool) -> jax.Array | None:
        """The temperature, in a kernel: NaN if it gives NaN logprobs; None without temperatures."""
        if self.temperatures is None:
            return None
        t = asarray(load_at_once(self.temperatures, target, interpreted))
        t = jnp.where(t == 0, jnp.float32(1), t)  # 0 means greedy, whose scaled logprobs use 1
        return asarray(jnp.where((t > 0) & (t < jnp.inf), t, jnp.float32(jnp.nan)))


def exponents_scale(temperature: jax.Array | None) -> jax.Array:
    """The factor of logit differences in exponents of 2, in a kernel; of `Targets.temperature`."""
    if temperature is None:
        return asarray(jnp.float32(LOG2_E))
    # Finite in any case: sums of bad temperatures must not make the row look invalid, nor those of
    # temperatures below 4e-39, whose reciprocals are infinite.
    scale = LOG2_E / jnp.where(temperature > 0, temperature, jnp.float32(1))
    return asarray(jnp.minimum(scale, jnp.float32(LARGEST)))


def over_temperature(x: jax.Array, temperature: jax.Array) -> jax.Array:
    """x / temperature, in a kernel or not; nearly rounded once.

    Compiled for a GPU, a division is `div.full.f32`, wrong by up to 2 units in the last place: more
    than the contract allows of a large logprob. So the remainder is divided once more.
    """
    quotient = x / temperature
    better = quotient + (x - quotient * temperature) / temperature
    # NaN where the quotient is infinite, or is NaN itself.
    return jnp.where(jnp.abs(better) < jnp.inf, better, quotient)


def make_targets(
    row_ids: jax.Array | None, num_rows: jax.Array | None, temperatures: jax.Array | None
) -> Targets:
    """The targets of a call of `pallas_kernels.topk_logprobs`, whose arguments were checked."""
    return Targets(row_ids, None if num_rows is None else num_rows.reshape(1), temperatures)
