"""Weights that a worker has loaded beside its own: it is told to use them, or to forget them."""

from collections.abc import Callable
from typing import Any

import jax

from jax_specdec.checkpoint.model_config import CheckpointError


class NextWeights:
    """The weights of an update, between the commands `Prepare` and `Commit`.

    Attributes:
      refusal: why those of the last update could not be loaded; empty where they could.
    """

    def __init__(self, load: Callable[[str, Any], Any] | None, place: Callable[[Any], Any]) -> None:
        """Begin with none.

        Args:
          load: reads the weights of a path; it also gets those in use. None: nothing can be read.
          place: puts weights on their devices.
        """
        self.refusal = ""
        self._load, self._place = load, place
        self._number = 0
        self._params: Any = None

    def prepare(self, number: int, path: str, current: Any) -> None:
        """Load the weights of an update; `refusal` says how that went.

        Args:
          number: of the update.
          path: where they are.
          current: the weights in use, whose shapes, types and places the new ones must have.
        """
        self._number, self._params, self.refusal = number, None, ""
        try:
            if self._load is None:
                raise ValueError("this worker was made without a way to load other weights")
            params = self._place(self._load(path, current))
            check_same(params, current)
            self._params = jax.block_until_ready(params)
        except Exception as error:  # whatever it is, the worker goes on with the weights it has
            expected = isinstance(error, OSError | ValueError | MemoryError) and str(error)
            self.refusal = str(error) if expected else f"{type(error).__name__}: {error}"

    def take(self, number: int) -> Any:
        """The weights of update `number`, which are given away.

        Raises:
          ValueError: they were not loaded.
        """
        if number != self._number or self._params is None:
            raise ValueError(f"update {number} of the weights was not prepared: prepare it first")
        params, self._params = self._params, None
        return params

    def discard(self, number: int) -> None:
        """Forget the weights of update `number`."""
        if number == self._number:
            self._params = None


def check_same(params: Any, current: Any) -> None:
    """Refuse weights that other programs would have to be compiled for.

    Raises:
      CheckpointError: a weight is missing, or has another shape, type or place.
    """
    structure, expected = str(jax.tree.structure(params)), str(jax.tree.structure(current))
    if structure != expected:
        raise CheckpointError(f"the weights are {structure}; those in use are {expected}")
    named = jax.tree_util.tree_leaves_with_path(current)
    for (path, old), new in zip(named, jax.tree.leaves(params), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CheckpointError(
                f"{name} is {new.dtype} {list(new.shape)}; the weights in use have {old.dtype} "
                f"{list(old.shape)}"
            )
        if _place_of(new) != _place_of(old):
            raise CheckpointError(f"{name} lies on other devices than the weights in use")


def _place_of(array: Any) -> Any:
    """The devices of an array, and whether it must stay there; None in NumPy."""
    if not isinstance(array, jax.Array):
        return None
    return array.sharding, getattr(array, "committed", None)
