"""The modes in which people debug programs of JAX, as contexts and as variables of a process."""

import contextlib

import jax

MODES = {
    "disable_jit": lambda: jax.disable_jit(),
    "checking_leaks": lambda: jax.checking_leaks(),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "x64": lambda: jax.enable_x64(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}

VARIABLES = {
    "disable_jit": ("JAX_DISABLE_JIT", "1"),
    "checking_leaks": ("JAX_CHECK_TRACER_LEAKS", "1"),
    "debug_nans": ("JAX_DEBUG_NANS", "1"),
    "debug_infs": ("JAX_DEBUG_INFS", "1"),
    "x64": ("JAX_ENABLE_X64", "1"),
    "strict promotion": ("JAX_NUMPY_DTYPE_PROMOTION", "strict"),
    "rank promotion": ("JAX_NUMPY_RANK_PROMOTION", "raise"),
    "transfer_guard": ("JAX_TRANSFER_GUARD", "disallow"),
}


@contextlib.contextmanager
def users_defaults():
    """What the suite is stricter in than jax is to its users."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
