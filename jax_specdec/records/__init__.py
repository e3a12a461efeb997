"""Messages in, records out: NumPy columns and pure functions.

Arrays are annotated with `NDArray`, and their shapes stand in docstrings. `jaxtyping` could check
them, but importing it (asyncio, ssl and unittest come along) takes as long as the engine's side.
"""

import jax_specdec.beside.ipc  # noqa: F401
