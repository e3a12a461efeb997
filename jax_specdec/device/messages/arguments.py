"""Checks of the messages' functions: kinds, types and shapes, each named where wrong.

Checks are made when a call is traced: values are those of the device, where `pack` checks them.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.requests import SamplingParams

_ArrayKind = Literal["floats", "integers", "bools"]
_KINDS = {"floats": jnp.floating, "integers": jnp.integer, "bools": np.bool_}


def check_option_type(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}: give {what}")


def check_array(
    name: str, value: Any, kind: _ArrayKind, shape: tuple[int | str, ...], axes: str
) -> None:
    """Refuse what is no array of this kind and shape; a letter stands for any size."""
    check_option_type(name, value, (np.ndarray, jax.Array), "a NumPy or JAX array")
    if not jnp.issubdtype(value.dtype, _KINDS[kind]):
        raise TypeError(f"{name} is of {value.dtype}: give an array of {kind}")
    sizes = zip(value.shape, shape, strict=False)
    if value.ndim != len(shape) or any(isinstance(b, int) and a != b for a, b in sizes):
        expected = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        raise ValueError(f"{name} {value.shape}: give {axes} = ({expected})")


def check_step_logits(
    logits: Any, row_ids: Any, slots: tuple[int, ...], name: str = "logits"
) -> None:
    """Refuse logits that are not those of B slots of S positions, by slot or flat."""
    if row_ids is None:
        check_array(name, logits, "floats", (*slots, "V"), "[B, S, V] as token_ids, or flat rows,")
        return
    check_array("row_ids", row_ids, "integers", slots, "one for each of token_ids [B, S]")
    check_array(name, logits, "floats", ("N", "V"), "flat rows [N, V], as row_ids name them,")


def check_requests(params: Sequence[SamplingParams]) -> None:
    """Refuse what is no list of parameters."""
    check_option_type("params", params, (list, tuple), "a list of `SamplingParams`, one a slot")
    for index, request in enumerate(params):
        check_option_type(f"params[{index}]", request, SamplingParams, "`SamplingParams`")


def check_size(name: str, value: object, what: str) -> None:
    """Refuse what is no Python int of 1 and more."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} is {value!r}: give a Python int, {what}")
    if value < 1:
        raise ValueError(f"{name} = {value}: give {what}, 1 and more")
