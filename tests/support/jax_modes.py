"""The modes in which people debug programs of JAX: contexts and variables of a process."""

import jax

MODES = {
    "disable_jit": (jax.disable_jit, True, "JAX_DISABLE_JIT"),
    "checking_leaks": (lambda _: jax.checking_leaks(), True, "JAX_CHECK_TRACER_LEAKS"),
    "debug_nans": (jax.debug_nans, True, "JAX_DEBUG_NANS"),
    "debug_infs": (jax.debug_infs, True, "JAX_DEBUG_INFS"),
    "x64": (jax.enable_x64, True, "JAX_ENABLE_X64"),
    "strict promotion": (jax.numpy_dtype_promotion, "strict", "JAX_NUMPY_DTYPE_PROMOTION"),
    "rank promotion": (jax.numpy_rank_promotion, "raise", "JAX_NUMPY_RANK_PROMOTION"),
    "transfer_guard": (jax.transfer_guard, "disallow", "JAX_TRANSFER_GUARD"),
}
