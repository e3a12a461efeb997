"""Wrong arguments of every kind, and whether an error is one that a person can act on."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.paths import ROOT

PACKAGES = tuple(str(ROOT / name) for name in ("pallas_kernels", "jax_specdec", "ipc"))


def wrong_arrays(x):
    """Values that are no array as `x` is one: by kind, dtype and shape; each with a name."""
    x = np.asarray(jax.device_get(x))
    yield "text", "logits"
    yield "an object", object()
    yield "nested lists", [[1, 2], [3]]
    yield "complex", np.zeros(x.shape, np.complex64)
    yield "a key", jax.random.split(jax.random.key(0), x.shape) if x.ndim else jax.random.key(0)
    if np.issubdtype(x.dtype, np.floating) or str(x.dtype) == "bfloat16":
        yield "integers", np.zeros(x.shape, np.int32)
    else:
        yield "floats", np.zeros(x.shape, np.float32)
    yield "one axis more", jnp.asarray(x)[None]
    if x.ndim:
        yield "one axis fewer", jnp.asarray(x)[0]
        yield "one entry more", jnp.concatenate([jnp.asarray(x), jnp.asarray(x)[:1]])


def complaint(call, name):
    """What is wrong with the error of a call whose argument `name` is wrong; None: nothing."""
    try:
        jax.block_until_ready(call())
    except (TypeError, ValueError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = Path(last.filename).is_relative_to(ROOT) and last.filename.startswith(PACKAGES)
        words = name.split(".")
        text = str(error)
        if not ours:
            where = f"{last.filename}:{last.lineno}"
            return f"from inside of {where}: {type(error).__name__}: {text[:120]}"
        if not any(word in text for word in words):
            return f"does not name it: {text[:160]}"
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"
    return "taken"
