"""One device's part of a call, with a derivative of its own.

Autodiff of the forward pass would keep every block's logits. Forward mode is not offered: JAX says
so of a function with a `custom_vjp` (TypeError).
"""

import functools
from typing import Any

import jax

from pallas_kernels.linear import backward, forward
from pallas_kernels.linear.types import Call, Inputs
from pallas_kernels.types import TopkLogprobs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_topk_logprobs(call: Call, inputs: Inputs) -> TopkLogprobs:
    """`forward.topk_logprobs`, differentiable in reverse mode."""
    return forward.topk_logprobs(call, inputs)


def _forward(call: Call, inputs: Inputs) -> tuple[TopkLogprobs, Any]:
    out = linear_topk_logprobs(call, inputs)
    return out, (inputs, out)


def _backward(call: Call, kept: Any, given: TopkLogprobs) -> tuple[Inputs]:
    inputs, out = kept
    return (backward.cotangents(call, inputs, out, given),)


linear_topk_logprobs.defvjp(_forward, _backward)
