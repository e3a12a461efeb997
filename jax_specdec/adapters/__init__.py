"""Adapters: this library's logprobs inside of other trainers and engines that run on JAX.

One module a peer: `tunix`, `maxtext`, `sglang_jax`, `tpu_inference`. Each has the peer's own
functions with the peer's own signatures, and `install()`, which puts them in the peer's place for
the time of a `with`. A module imports its peer when one of its functions is called.
"""

import jax_specdec.beside.pallas_kernels  # noqa: F401
from jax_specdec.adapters import maxtext, sglang_jax, tpu_inference, tunix

__all__ = ["tunix", "maxtext", "sglang_jax", "tpu_inference"]
