"""Ray, imported where it is needed: the room can be imported without it."""

import importlib
from typing import Any


def ray(module: str = "ray") -> Any:
    """Import Ray, or a module of it; ModuleNotFoundError names the way out."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("ray", "fastapi", "pandas"):
            raise
        raise ModuleNotFoundError(
            f"engines on a cluster need {error.name}: "
            "pip install 'ray[default,serve,data]>=2.50' 'pyarrow>=16'",
            name=error.name,
        ) from error
