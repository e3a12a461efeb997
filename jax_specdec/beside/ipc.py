"""Importing this says whether `ipc` is ours; see `jax_specdec.beside`."""

from jax_specdec.beside import require

require("ipc")
