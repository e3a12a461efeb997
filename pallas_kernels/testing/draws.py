"""Draws of a token by groups, in float64 NumPy: what a kernel that draws is compared with.

The random words are those of `numbers.random_draws`, which have a test of their own; the rest
shares nothing with the code under test.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends.groups import WIDTH as GROUP_WIDTH
from pallas_kernels.backends.groups import RowsToDraw
from pallas_kernels.numbers.random_draws import threefry_word

PURPOSES = (3, 1)  # of the noise of groups, of tokens


def _gumbel(seed: int, purpose: int, position: int, ids: Any) -> Any:
    """Noise of ids, float64."""
    ids = jnp.asarray(ids, jnp.int32)
    bits = threefry_word(jnp.uint32(seed), purpose, jnp.int32(position), ids)
    u = np.minimum((np.asarray(bits).astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -np.log(-np.log1p(-u))


def in_groups(x: Any) -> Any:
    """[..., V] -> [..., G, 256], float64; -inf behind the last token."""
    missing: Any = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP_WIDTH)]
    padded = np.pad(np.asarray(x).astype(np.float64), missing, constant_values=-np.inf)
    return padded.reshape(*x.shape[:-1], -1, GROUP_WIDTH)


def group_sums(x: Any, inverse: Any) -> tuple[Any, Any]:
    """Maxima and sums [R, G] of exp((x - maximum) / T), float32 as a read leaves them."""
    groups = in_groups(x)
    maxima = groups.max(axis=-1)
    finite = np.where(np.isfinite(maxima), maxima, 0)[..., None]
    sums = np.exp((groups - finite) * np.asarray(inverse, np.float64)[:, None, None]).sum(-1)
    return maxima.astype(np.float32), sums.astype(np.float32)


def rows_to_draw(x: Any, slots: Sequence["DrawSlot"], inverse: Any) -> RowsToDraw:
    """A kernel's inputs of rows x [N, V], as NumPy arrays; slots are `DrawSlot`s."""
    inverse = np.asarray(inverse, np.float32)
    maxima, sums = group_sums(x, inverse)
    most = max(len(slot.taken) for slot in slots)
    taken = [(*slot.taken, *[-1] * (most - len(slot.taken))) for slot in slots]
    fields: dict[str, Any] = {
        "rows": np.array([slot.row for slot in slots], np.int32),
        "cut_logit": np.array([slot.cut_logit for slot in slots], np.float32),
        "cut_id": np.array([slot.cut_id for slot in slots], np.int32),
        "excluded_ids": np.array(taken, np.int32).reshape(len(slots), most),
        "seed": np.array([slot.seed for slot in slots], np.uint32),
        "position": np.array([slot.position for slot in slots], np.int32),
        "maxima": maxima,
        "sums": sums,
        "largest": np.asarray(x).astype(np.float32).max(axis=1),
        "inverse": inverse,
    }
    return RowsToDraw(**fields)


class DrawSlot(NamedTuple):
    """A slot to draw for."""

    row: int
    seed: int = 0
    position: int = 0
    taken: tuple[int, ...] = (-1,)
    cut_logit: float = -np.inf
    cut_id: int = 2**31 - 1


def expected(
    x: Any, slot: DrawSlot, inverse: Any, purposes: tuple[int, int] = PURPOSES
) -> tuple[float, int, float]:
    """The score and the token of a slot, and how far its group and its token lie ahead."""
    row = np.asarray(x[slot.row]).astype(np.float64)
    ids = np.arange(len(row))
    is_kept = (row > slot.cut_logit) | ((row == slot.cut_logit) & (ids < slot.cut_id))
    is_kept |= ids == slot.cut_id
    is_kept[[token for token in slot.taken if token >= 0]] = False
    inverse = float(np.float32(inverse[slot.row]))
    kept_logits = in_groups(np.where(is_kept, row, -np.inf))
    with np.errstate(divide="ignore"):
        weights = np.log(np.exp((kept_logits - row.max()) * inverse).sum(axis=1))
    source = slot.seed, slot.position
    scores = weights + _gumbel(source[0], purposes[0], source[1], np.arange(len(kept_logits)))
    group = int(scores.argmax())
    first = group * GROUP_WIDTH
    scores_in_group = kept_logits[group] * inverse
    scores_in_group = scores_in_group + _gumbel(
        source[0], purposes[1], source[1], first + np.arange(GROUP_WIDTH)
    )
    return (
        float(scores[group]),
        first + int(scores_in_group.argmax()),
        min(_ahead(scores), _ahead(scores_in_group)),
    )


def _ahead(scores: Any) -> float:
    second, best = np.sort(scores)[-2:]
    return float(best - second)


def check_drawn(
    drawn: Any,
    x: Any,
    slots: Sequence[DrawSlot],
    inverse: Any,
    purposes: tuple[int, int] = PURPOSES,
) -> None:
    """The draws are those of float64; slots must be such that rounding does not decide."""
    scores, tokens = (np.asarray(part) for part in drawn)
    for i, slot in enumerate(slots):
        if slot.row < 0:
            assert (scores[i], tokens[i]) == (-np.inf, -1)
            continue
        score, token, ahead = expected(x, slot, inverse, purposes)
        assert ahead > 1e-4, f"slot {i} would be decided by rounding: take another seed"
        assert tokens[i] == token, f"slot {i} drew {tokens[i]}, not {token}"
        np.testing.assert_allclose(scores[i], score, rtol=1e-5, atol=1e-5)
