"""Exact top K, logprobs and token ranks from logits, in one read where a kernel allows it.

This door is all of the package that anything outside may import; what lies behind it may change.
The package needs jax and nothing else of the project.
"""

from pallas_kernels.backends.choose import Implementation, gpu_obstacle
from pallas_kernels.backends.sampled_draw import Drawn, RowsToDraw
from pallas_kernels.backends.sampled_draw import draw as draw_rows
from pallas_kernels.backends.xla.greedy import greedy, greedy_token_ids
from pallas_kernels.backends.xla.group_sums import WIDTH as GROUP_WIDTH
from pallas_kernels.backends.xla.group_sums import GroupSums, inverse_temperature, sums_of_groups
from pallas_kernels.backends.xla.groups import FEW as FEW_CANDIDATES
from pallas_kernels.backends.xla.groups import MANY as MANY_CANDIDATES
from pallas_kernels.backends.xla.kept_groups import keeps
from pallas_kernels.contract.types import Greedy, TopkLogprobs
from pallas_kernels.contract.wanted import RankTies
from pallas_kernels.linear.call import linear_kept_logprobs, linear_topk_logprobs
from pallas_kernels.linear.types import LinearKeptLogprobs
from pallas_kernels.lowering.blocks import map_blocks, vary_like
from pallas_kernels.meshes.vocab_shard import WHOLE, VocabShard, named_logits
from pallas_kernels.numbers.exponential import exponential
from pallas_kernels.numbers.gumbel import gumbel_of_bits, log_of
from pallas_kernels.numbers.logarithm import logarithm
from pallas_kernels.numbers.threefry import word as threefry_word
from pallas_kernels.sampling.read_logprobs import logprobs_of_read
from pallas_kernels.sampling.rows import GroupedRows, top_candidates
from pallas_kernels.topk.call import greedy_topk_logprobs, topk_logprobs
from pallas_kernels.topk.tables import LogprobsTensors, logprobs_tensors, padded_token_ids

__all__ = [
    "topk_logprobs",
    "greedy_topk_logprobs",
    "greedy",
    "greedy_token_ids",
    "TopkLogprobs",
    "Greedy",
    "Implementation",
    "RankTies",
    "gpu_obstacle",
    # From hidden states and a head, without logits.
    "linear_topk_logprobs",
    "linear_kept_logprobs",
    "LinearKeptLogprobs",
    # The tables that serving engines hold.
    "logprobs_tensors",
    "LogprobsTensors",
    "padded_token_ids",
    # For your own code inside `jax.shard_map`.
    "VocabShard",
    "WHOLE",
    "named_logits",
    "vary_like",
    "map_blocks",
    # What drawing from rows needs.
    "GroupedRows",
    "top_candidates",
    "logprobs_of_read",
    "GroupSums",
    "GROUP_WIDTH",
    "sums_of_groups",
    "FEW_CANDIDATES",
    "MANY_CANDIDATES",
    "inverse_temperature",
    "exponential",
    "logarithm",
    "keeps",
    "draw_rows",
    "RowsToDraw",
    "Drawn",
    "threefry_word",
    "gumbel_of_bits",
    "log_of",
]
