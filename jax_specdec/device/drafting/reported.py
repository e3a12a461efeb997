"""Draws of drafts, with what a draft message is to have of them."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels import sampling
from pallas_kernels.sampling import Drafts, Sampling

# What a draft message has of one draft a slot: of its logits, as `draw` has them, and of the draft.
ReportDrafts = Callable[[jax.Array, Drafts], Any]


def draw(
    draft_logits: Float[Array, "B 1 V"] | Float[Array, "N V"],
    sampling_of_slots: Sampling,
    positions: Int32[Array, " B"],
    *,
    report_drafts: ReportDrafts | None = None,
    **where: Any,
) -> Drafts:
    """`pallas_kernels.sampling.draw`, and the report on each draft that is drawn.

    Args:
      draft_logits, sampling_of_slots, positions: as there.
      report_drafts: makes the report (`jax_specdec.device.draft_rows`); None: there is none.
      where: as there: `row_ids`, `mesh`, `axis_name` and `vocab_size`.
    """
    drafts = sampling.draw(draft_logits, sampling_of_slots, positions, **where)
    if report_drafts is None:
        return drafts
    return drafts._replace(report=report_drafts(draft_logits, drafts))
