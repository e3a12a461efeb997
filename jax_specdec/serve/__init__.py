"""An OpenAI-compatible server around an engine (extra `serve`); `jax-specdec serve` runs it.

Nothing here imports jax.
"""

import jax_specdec.beside.ipc  # noqa: F401
