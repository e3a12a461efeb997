"""What was told of drafts, taken over where a batch changes its kind.

Axes: B slots, D drafts.
"""

from typing import Any

import jax
import numpy as np

from jax_specdec.device.loop.kinds import Kind
from pallas_kernels.sampling import Told


def as_told(kind: Kind, told: Told | None, drafts: Any) -> Told | None:
    """What was told of drafts by programs of an earlier kind, in the widths of this one.

    A slot's own columns are in both. Widths change seldom, and nothing is compiled: it is read.

    Args:
      kind: of the next step.
      told: by the last one, if it told anything.
      drafts: [B, D], where they are.
    """
    if not kind.told or kind.widths.k is None:
        return None
    shape, columns = drafts.shape, kind.widths.num_columns
    widths = columns, kind.widths.chosen
    if told is not None and widths == (told.logprobs.shape[-1], told.extra_logprobs.shape[-1]):
        return told
    arrays: Any = (
        np.zeros((*shape, columns), np.int32),
        np.zeros((*shape, columns), np.float32),
        np.zeros(shape, np.int32),
        np.zeros((*shape, kind.widths.chosen), np.float32),
    )
    new = Told(*arrays)
    if told is not None:
        arrays[2][:] = told.token_ranks
        for name in ("token_ids", "logprobs", "extra_logprobs"):
            wide, old = getattr(new, name), np.asarray(getattr(told, name))
            both = min(wide.shape[-1], old.shape[-1])
            wide[..., :both] = old[..., :both]
    placed: Told = jax.device_put(new, drafts.sharding if drafts.committed else None)
    return placed
