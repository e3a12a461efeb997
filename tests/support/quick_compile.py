"""XLA's cheapest way to compile, for programs whose compiling costs a test more than running them.

`tests/conftest.py` makes it that of every process of the tests. Users' programs are compiled with
XLA's defaults: a test of what rounding does takes `as_users`.
"""

from functools import partial
from importlib.metadata import version

import jax

# What XLA decides before it generates code is as ever: buffers, fusions, collectives.
UNOPTIMIZED: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
# A fifth of the time that the defaults take, on a CPU. jaxlib 0.11 no longer knows the last one.
OPTIONS = dict(UNOPTIMIZED)
if version("jaxlib").startswith("0.10."):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

jit = partial(jax.jit, compiler_options=OPTIONS)  # in place of `jax.jit`

DEFAULTS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
if "xla_cpu_use_fusion_emitters" in OPTIONS:
    DEFAULTS["xla_cpu_use_fusion_emitters"] = True
as_users = partial(jax.jit, compiler_options=DEFAULTS)

# XLA computes on constants while it compiles, slowly; so much of them is better not known to it.
unknown = jax.lax.optimization_barrier

# The same as a value of XLA_FLAGS, for processes.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
