"""The end of a message: the kept sets of its emitted tokens.

The bytes are not trusted. A count is checked before the sum of counts is used, that sum before
anything is viewed, and the ids before anyone reads them.
"""

import numpy as np
from numpy.typing import NDArray

from ipc import wire
from jax_specdec.kept_sets import KeptSets, offsets_of
from jax_specdec.records.errors import MessageError
from jax_specdec.wording import pluralize


def decode_kept(
    words: NDArray[np.uint32], start: int, slots: dict[str, NDArray[np.int64]]
) -> tuple[KeptSets, NDArray[np.int64]]:
    """The kept sets of a message that has some; views of its words.

    Args:
      words: [W] the whole message.
      start: the word after its top-K ids.
      slots: [B] each, the checked fields of its slots.

    Returns:
      The sets of all kept rows, and [B] int64 the place of each slot's first one.

    Raises:
      MessageError: a count that cannot be, another number of words than the counts make, or ids
        that do not ascend from 0.
    """
    rows = wire.kept_rows(np, slots["state"], slots["num_tokens"], slots["kept"])
    ends = rows.cumsum()
    num = int(ends[-1])
    ids_start = start + 2 * num
    if ids_start > words.size:
        raise MessageError(
            f"{pluralize(num, 'kept row')} make {ids_start} words; the message has {words.size}"
        )
    counts = words[start : start + num].view(np.int32)
    wrong = (counts == 0) | (counts > wire.MAX_KEPT) | (counts < wire.KEPT_MANY)
    if wrong.any():
        row = int(wrong.argmax())
        raise MessageError(
            f"kept row {row}: a count of {int(counts[row])} cannot be (1 to {wire.MAX_KEPT}, "
            f"{wire.KEPT_ALL} where nothing was cut, {wire.KEPT_MANY} where more are left)"
        )
    offsets = offsets_of(counts)
    end = ids_start + int(offsets[-1])
    if end != words.size:
        raise MessageError(f"the kept counts make {end} words; the message has {words.size}")
    ids = words[ids_start:].view(np.int32)
    _check_ids(ids, offsets)
    masses = words[start + num : ids_start].view(np.float32)
    offsets.flags.writeable = False
    return KeptSets(counts, masses, offsets, ids), ends - rows


def _check_ids(ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
    """Raise MessageError where the ids of a set do not ascend, or one is negative."""
    if not ids.size:
        return
    risen = ids[1:] > ids[:-1]
    inner = offsets[(offsets > 0) & (offsets < ids.size)]
    risen[inner - 1] = True  # the next set begins there
    if risen.all() and int(ids.min()) >= 0:
        return
    negative = ids < 0
    at = int(negative.argmax()) if negative.any() else int(risen.argmin()) + 1
    row = int(offsets.searchsorted(at, side="right")) - 1
    before = f" after {int(ids[at - 1])}" if at > offsets[row] else ""
    raise MessageError(
        f"kept row {row}: token id {int(ids[at])}{before} cannot be: ids ascend from 0"
    )
