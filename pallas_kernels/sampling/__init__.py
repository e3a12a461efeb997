"""Verification of drafts, and what belongs to it: draws, truncation, kept sets, a learner's side.

This door, beside `pallas_kernels`, is what anything outside may import; what lies behind it may
change.
"""

from pallas_kernels.sampling.distribution import truncation
from pallas_kernels.sampling.drafts import draw, joined, none_drawn
from pallas_kernels.sampling.kept_set import kept_sets
from pallas_kernels.sampling.learning import kept_logprobs, learner_logprobs
from pallas_kernels.sampling.parameters import Sampling, Truncation
from pallas_kernels.sampling.row_read import emitted_logprobs
from pallas_kernels.sampling.types import (
    AcceptRule,
    CompactQ,
    DenseQ,
    DraftReport,
    Drafts,
    ReportDrafts,
    RowsRead,
    Verified,
    row_ids_of,
)
from pallas_kernels.sampling.verification import accept_draft, verify

__all__ = [
    "verify",
    "Verified",
    "emitted_logprobs",
    "RowsRead",
    "Drafts",
    "CompactQ",
    "DenseQ",
    "Sampling",
    "row_ids_of",
    # Drafts that are drawn.
    "draw",
    "joined",
    "none_drawn",
    # What a row keeps, and a learner's logprobs over it.
    "truncation",
    "Truncation",
    "kept_sets",
    "kept_logprobs",
    "learner_logprobs",
    # A rule, and a report of drafts, of one's own.
    "accept_draft",
    "AcceptRule",
    "ReportDrafts",
    "DraftReport",
]


def __dir__() -> list[str]:
    return __all__
