"""What the chip that a program is lowered for has, as far as jax knows it."""

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backends.mosaic_tpu.plan import Plan
from pallas_kernels.lowering.obstacles import DoesNotFit

MIB = 1 << 20


def vmem_bytes() -> int | None:
    """The VMEM of a core; None on a host without a TPU that does not say for which one it lowers.

    `jax.sharding.use_abstract_mesh` of a mesh of devices says so.
    """
    try:
        return int(pltpu.get_tpu_info().vmem_capacity_bytes)
    except ValueError:  # a device that jax does not know, as a CPU
        return None


def must_fit(plan: Plan) -> None:
    """Raise `DoesNotFit` where the chip is known and its VMEM is less than a plan may take."""
    held = None if plan.interpreted else vmem_bytes()
    if held is not None and plan.needed_bytes > held:
        raise DoesNotFit(
            f"rows of {plan.vocabulary} {plan.dtype} logits and a top K of {plan.k} may take "
            f"{plan.needed_bytes / MIB:.1f} MiB of VMEM, and this chip has {held / MIB:.1f}"
        )
