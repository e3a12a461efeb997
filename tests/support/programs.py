"""The kernels' calls, each compiled once for all tests that make it with arrays of the same shapes.

In place of the calls of `pallas_kernels`, with the same arguments. Outside of `jax.jit` these
compile their loops at every call. XLA compiles as it does for users.
"""

import functools
import inspect

import pallas_kernels
from tests.support import quick_compile

STATIC = {
    "k", "implementation", "axis_name", "row_axis_name", "mesh", "vocab_size", "rank_ties",
    "log_sum_exp", "entropy", "top_logits", "scale", "soft_cap", "logits_dtype", "head_axes",
}  # fmt: skip


def compiled(function):
    """The function, compiled for each set of arguments in `STATIC`."""
    signature = inspect.signature(function)

    @functools.cache
    def program(static):
        return quick_compile.as_users(lambda arrays: function(**arrays, **dict(static)))

    def call(*arguments, **named):
        given = signature.bind(*arguments, **named).arguments
        given |= given.pop("options", {})  # what `logprobs_tensors` passes on
        static = tuple((name, value) for name, value in given.items() if name in STATIC)
        return program(static)({name: x for name, x in given.items() if name not in STATIC})

    return call


topk_logprobs = compiled(pallas_kernels.topk_logprobs)
greedy = compiled(pallas_kernels.greedy)
linear_topk_logprobs = compiled(pallas_kernels.linear_topk_logprobs)
logprobs_tensors = compiled(pallas_kernels.logprobs_tensors)
