"""Importing this says whether `pallas_kernels` is ours; see `jax_specdec.beside`."""

from jax_specdec.beside import require

require("pallas_kernels")
