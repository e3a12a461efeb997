"""Weights that workers are to read: a checkpoint, or arrays that are written as one."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.model_config import CheckpointError
from jax_specdec.control import WorkerConfig
from jax_specdec.engine.errors import WeightsError


class WeightsSource:
    """A checkpoint that workers read; one that was written for them is removed with it.

    Attributes:
      path: a file or a directory.
    """

    def __init__(self, path: Path, *, temporary: bool = False) -> None:
        """Note what there is at `path` now.

        Raises:
          OSError: nothing, or it cannot be read.
        """
        self.path = path.absolute()
        self._temporary = temporary
        self._state = self._look()

    @classmethod
    def of(
        cls, weights: str | Path | Mapping[str, Any], config: WorkerConfig, target: Path
    ) -> "WeightsSource":
        """The source for `Engine.update_weights`; arrays are written to `target`.

        Raises:
          WeightsError: there is nothing at the path, or the arrays cannot be written.
        """
        try:
            if not isinstance(weights, Mapping):
                return cls(Path(weights))
            # Milliseconds, which only those pay for who have arrays.
            from jax_specdec.checkpoint.written_arrays import write_arrays

            made = write_arrays(
                weights, config.weights, target, is_own_model=bool(config.own_model)
            )
            return cls(made, temporary=True)
        except (OSError, CheckpointError, ValueError) as error:
            for leftover in target.parent.glob(f"{target.name}.*"):
                _remove(leftover)
            raise WeightsError(f"the weights cannot be read: {error}") from error

    def check_unchanged(self) -> None:
        """Refuse files that were written to since: workers would use different weights.

        Raises:
          OSError: they were, or they are gone.
        """
        if self._look() != self._state:
            raise OSError(f"{self.path} has changed since its weights were loaded")

    def remove(self) -> None:
        """Remove what was written for the workers; a user's files stay."""
        if self._temporary:
            _remove(self.path)

    def _look(self) -> list[tuple[str, int, int, int]]:
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        stats = [(file.name, file.stat()) for file in files]
        return [(name, seen.st_ino, seen.st_size, seen.st_mtime_ns) for name, seen in stats]


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            import shutil

            shutil.rmtree(path)
        else:
            path.unlink()
