"""Exact top K, logprobs and token ranks from logits, in one read where a kernel allows it."""

from pallas_kernels.greedy import greedy, greedy_token_ids
from pallas_kernels.topk_logprobs import greedy_topk_logprobs, topk_logprobs
from pallas_kernels.types import Greedy, TopkLogprobs

__all__ = [
    "topk_logprobs",
    "greedy_topk_logprobs",
    "TopkLogprobs",
    "greedy",
    "greedy_token_ids",
    "Greedy",
]
