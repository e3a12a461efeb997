"""The report on drafts, taken over where a batch changes its kind.

Axes: B slots, D drafts.
"""

from typing import Any

import jax
import numpy as np

from jax_specdec.device.loop.kinds import Kind
from jax_specdec.device.messages.row_logprobs import DraftReport


def as_report(kind: Kind, report: DraftReport | None, drafts: Any) -> DraftReport | None:
    """The report that programs of an earlier kind made, in the widths of this one.

    A slot's own columns are in both. Widths change seldom, and nothing is compiled: it is read.

    Args:
      kind: of the next step.
      report: of the last one, if it made one.
      drafts: [B, D], where they are.
    """
    if not kind.reports_drafts or kind.widths.k is None:
        return None
    shape, columns = drafts.shape, kind.widths.num_columns
    widths = columns, kind.widths.chosen
    if report is not None and widths == (
        report.logprobs.shape[-1],
        report.extra_logprobs.shape[-1],
    ):
        return report
    arrays: Any = (
        np.zeros((*shape, columns), np.int32),
        np.zeros((*shape, columns), np.float32),
        np.zeros(shape, np.int32),
        np.zeros((*shape, kind.widths.chosen), np.float32),
    )
    new = DraftReport(*arrays)
    if report is not None:
        arrays[2][:] = report.token_ranks
        for name in ("token_ids", "logprobs", "extra_logprobs"):
            wide, old = getattr(new, name), np.asarray(getattr(report, name))
            both = min(wide.shape[-1], old.shape[-1])
            wide[..., :both] = old[..., :both]
    placed: DraftReport = jax.device_put(new, drafts.sharding if drafts.committed else None)
    return placed
