"""Programs that are lowered or compiled and never run: their kernels, and what they need beside."""

import jax

from tests.support import quick_compile

KERNELS = "custom_call @mosaic_gpu", "custom_call @tpu_custom_call"


def array(shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def text_of(function, *arrays, platform="cuda"):
    """The program's text for a platform, which need not be here."""
    # Another function each time: JAX keeps what it lowered.
    traced = jax.jit(lambda *given: function(*given)).trace(*arrays)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def kernels_of(function, *arrays, platform="cuda"):
    """How many kernels of ours the program for a platform has."""
    text = text_of(function, *arrays, platform=platform)
    return sum(map(text.count, KERNELS))


def temporaries(function, *arrays):
    """Bytes; XLA assigns buffers before it generates code, which is left unoptimized here."""
    compiled = jax.jit(function).lower(*arrays).compile(quick_compile.UNOPTIMIZED)
    return compiled.memory_analysis().temp_size_in_bytes
