"""XLA's cheapest way to compile, for programs whose compiling costs a test more than running them.

Production code is compiled with XLA's defaults, so a test of what rounding does keeps to those.
"""

import functools
from importlib.metadata import version

import jax

# What XLA decides before it generates code is as ever: buffers, fusions, collectives.
UNOPTIMIZED: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
# A third of the time that the defaults take, on a CPU. jaxlib 0.11 no longer knows the second.
OPTIONS = dict(UNOPTIMIZED)
if version("jaxlib").startswith("0.10."):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

jit = functools.partial(jax.jit, compiler_options=OPTIONS)  # in place of `jax.jit`

# The same as a value of XLA_FLAGS, for processes.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
