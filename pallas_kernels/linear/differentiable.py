"""One device's part of a call, with a derivative of its own.

Autodiff of the forward pass would keep every block's logits. Forward mode is not offered: JAX says
so of a function with a `custom_vjp` (TypeError).
"""

import functools
from typing import Any

import jax

from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.linear import backward, forward
from pallas_kernels.linear.types import Call, Inputs, RowScale


def linear_topk_logprobs(call: Call, inputs: Inputs) -> TopkLogprobs:
    """`forward.topk_logprobs`, differentiable in reverse mode."""
    return _with_scale(call, inputs)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_scale(call: Call, inputs: Inputs) -> tuple[TopkLogprobs, RowScale]:
    """With what the backward pass needs, whose own derivative is needed for second ones."""
    return forward.with_scale(call, inputs)


def _forward(call: Call, inputs: Inputs) -> tuple[tuple[TopkLogprobs, RowScale], Any]:
    found = _with_scale(call, inputs)
    return found, (inputs, *found)


def _backward(call: Call, kept: Any, given: tuple[TopkLogprobs, RowScale]) -> tuple[Inputs]:
    inputs, out, scale = kept
    return (backward.cotangents(call, inputs, out, scale, *given),)


_with_scale.defvjp(_forward, _backward)
