"""Exact top K, logprobs and token ranks from logits, in one read where a kernel allows it.

This door and `pallas_kernels.sampling` are all of the package that anything outside may import;
what lies behind them may change. The package needs jax and nothing else of the project.
"""

from pallas_kernels.backends.choose import gpu_obstacle
from pallas_kernels.backends.greedy import greedy
from pallas_kernels.contract.types import TopkLogprobs
from pallas_kernels.linear.call import linear_kept_logprobs, linear_topk_logprobs
from pallas_kernels.linear.support_call import linear_support_kl
from pallas_kernels.lowering.forms import vary_like
from pallas_kernels.lowering.implementation import use_implementation
from pallas_kernels.meshes.placement import VocabShard
from pallas_kernels.topk.call import topk_logprobs
from pallas_kernels.topk.digests import equal_digests, row_digests
from pallas_kernels.topk.tables import logprobs_tensors, padded_token_ids

__all__ = [
    "topk_logprobs",
    "TopkLogprobs",
    "greedy",
    # Whether whole rows of two computations are the same.
    "row_digests",
    "equal_digests",
    # From hidden states and a head, without logits.
    "linear_topk_logprobs",
    "linear_kept_logprobs",
    "linear_support_kl",
    # The tables that serving engines hold.
    "logprobs_tensors",
    "padded_token_ids",
    # For your own code inside `jax.shard_map`.
    "VocabShard",
    "vary_like",
    # Which implementation calls take, and why it is not the GPU kernels.
    "use_implementation",
    "gpu_obstacle",
]


def __dir__() -> list[str]:
    return __all__
