"""Verification of drafts, and what belongs to it: draws, truncation, kept sets, a learner's side.

This door, beside `pallas_kernels`, is what anything outside may import; what lies behind it may
change.
"""

from pallas_kernels.sampling.distribution import truncation
from pallas_kernels.sampling.drafts import draw
from pallas_kernels.sampling.kept_set import kept_sets
from pallas_kernels.sampling.learner_arguments import check_digests, check_kept
from pallas_kernels.sampling.learning import kept_logprobs, learner_logprobs, rollout_logprobs
from pallas_kernels.sampling.parameters import Sampling, Truncation
from pallas_kernels.sampling.row_read import emitted_logprobs, logprobs_of_read
from pallas_kernels.sampling.types import CompactQ, DenseQ, Drafts, RowsRead, Verified, row_ids_of
from pallas_kernels.sampling.verification import verify

__all__ = [
    # Drafts, what they were drawn from, and how a slot samples.
    "Drafts",
    "CompactQ",
    "DenseQ",
    "Sampling",
    "draw",
    # Which of them are accepted, and the logprobs of what is emitted.
    "verify",
    "Verified",
    "row_ids_of",
    "emitted_logprobs",
    "logprobs_of_read",
    "RowsRead",
    # What a row keeps, and a learner's logprobs over it.
    "truncation",
    "Truncation",
    "kept_sets",
    "check_kept",
    "check_digests",
    "kept_logprobs",
    "learner_logprobs",
    "rollout_logprobs",
]


def __dir__() -> list[str]:
    return __all__
