"""What the requests of a batch change of the logits, as the device needs it.

Axes: B slots, I ids that a request names.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_specdec.device.messages.buckets import changes_bucket
from jax_specdec.device.messages.logit_changes import Changes, Penalties
from jax_specdec.requests import SamplingParams


class ChangesSize(NamedTuple):
    """The size of what a batch changes; a program is compiled for each."""

    ids: int  # I: columns of the tables of biased and of held-back ids
    penalties: bool  # some slot has any
    holds_back: bool = False  # some slot has ids that may not come yet

    def holds(self, other: "ChangesSize") -> bool:
        """Whether tables of this size have room for what is of the other one."""
        return all(mine >= its for mine, its in zip(self, other, strict=True))


def changes_size(params: Sequence[SamplingParams]) -> ChangesSize | None:
    """The size of what the requests of a batch change; None where none changes anything."""
    if not any(one.changes_logits for one in params):
        return None
    named = (*(one.logit_bias for one in params), *map(_held, params))
    return ChangesSize(
        ids=changes_bucket(max(map(len, named))),
        penalties=any(one.penalizes for one in params),
        holds_back=any(map(_held, params)),
    )


def changes_of(
    params: Sequence[SamplingParams],
    size: ChangesSize,
    prompt_lengths: Sequence[int],
    num_emitted: Sequence[int],
) -> Changes:
    """What the requests of a batch change, on the device: request b is in slot b.

    Args:
      params: of B requests.
      size: at least their `changes_size`.
      prompt_lengths: [B] tokens that each request was admitted with.
      num_emitted: [B] how many of them, at the end, were emitted for it elsewhere.
    """
    biases, width = [one.logit_bias for one in params], size.ids
    held_width = width if size.holds_back else 0
    lengths = np.array(prompt_lengths, np.int32)
    penalties = None
    if size.penalties:
        penalties = Penalties(
            repetition=_floats(one.repetition_penalty for one in params),
            frequency=_floats(one.frequency_penalty for one in params),
            presence=_floats(one.presence_penalty for one in params),
            output_start=_on_host(lengths - np.array(num_emitted, np.int32)),
        )
    changes = Changes(
        bias_ids=_table([[id for id, _ in one] for one in biases], width, -1, np.int32),
        bias=_table([[bias for _, bias in one] for one in biases], width, 0, np.float32),
        held_ids=_table([_held(one) for one in params], held_width, -1, np.int32),
        held_until=_on_host(lengths + np.array([one.min_tokens for one in params], np.int32)),
        penalties=penalties,
    )
    on_device: Changes = jax.device_put(changes)
    return on_device


def _held(params: SamplingParams) -> tuple[int, ...]:
    return tuple(dict.fromkeys(params.stop_token_ids)) if params.min_tokens else ()


def _floats(values: Iterable[float]) -> Any:
    return np.array(list(values), np.float32)


def _table(
    rows: Sequence[Sequence[float]], width: int, missing: int, dtype: type[np.generic]
) -> Any:
    table = np.full((len(rows), width), missing, dtype)
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def _on_host(values: np.ndarray) -> Any:
    """A NumPy array, where a carrier says `Array`: all go to the device in one call."""
    return values.astype(np.int32)
