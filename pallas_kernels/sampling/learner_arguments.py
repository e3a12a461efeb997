"""What a rollout hands to its learner, checked: kept sets, and digests of the rows it drew from.

Wrong ones are refused where their values are known. Under `jax.jit` nobody can: what would be
refused makes NaN there (digests), or is looked at before, by `check_kept` and `check_digests`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, UInt32

from pallas_kernels.contract.arguments import (
    check_int,
    check_type,
    float_array,
    integers,
    known_values,
)
from pallas_kernels.lowering.programs import compiled
from pallas_kernels.sampling.kept_set import KEPT_ALL, KEPT_MANY, PaddedKept
from pallas_kernels.topk.digests import CODE, DTYPES, row_digests

_AnyArray = jax.Array | np.ndarray
SHARE_ROUNDING = 1e-3  # by which the log of a share may be above 0


def check_kept(kept: tuple[_AnyArray, _AnyArray, _AnyArray], vocab_size: int) -> PaddedKept:
    """Refuse kept sets that cannot be, such as those of another vocabulary.

    Learner functions call it outside of `jax.jit`. Call it yourself before a jitted one, which
    knows no values.

    Args:
      kept: ids `[*rows, M]`, counts and log_kept `[*rows]`, as `kept_logprobs` has them.
      vocab_size: V of the learner.

    Returns:
      The sets as JAX arrays.

    Raises:
      TypeError, ValueError: they are no such arrays, or not of the same rows; an id of a set is
        outside the vocabulary or named twice, a count is no number of ids and no mark, or a share
        is above 1.
    """
    return sets_of(kept, None, check_int("vocab_size", vocab_size, 1, 2**31 - 1, "the learner's V"))


def sets_of(
    kept: tuple[_AnyArray, _AnyArray, _AnyArray], rows: tuple[int, ...] | None, vocab_size: int
) -> PaddedKept:
    """`check_kept` of sets that must be of these rows, or of any."""
    if not isinstance(kept, tuple) or len(kept) != 3:
        raise TypeError(
            f"kept is a {type(kept).__name__}: give the kept ids, counts and log_kept of each row, "
            "as `kept_sets` and a record's columns have them"
        )
    sets = PaddedKept(
        integers("kept.token_ids", kept[0], jnp.int32),
        integers("kept.counts", kept[1], jnp.int32),
        float_array("kept.log_kept", kept[2]).astype(jnp.float32),
    )
    partner = "one another" if rows is None else f"token_ids {rows}"
    rows = sets.counts.shape if rows is None else rows
    shapes = sets.token_ids.shape[:-1], sets.counts.shape, sets.log_kept.shape
    if sets.token_ids.ndim == 0 or shapes != (rows,) * 3:
        raise ValueError(
            f"kept.token_ids {sets.token_ids.shape}, kept.counts {sets.counts.shape} and "
            f"kept.log_kept {sets.log_kept.shape} do not go with {partner}: give "
            f"{(*rows, 'M')}, {rows} and {rows}"
        )
    ids, counts, shares = (known_values(x) for x in kept)
    if counts is not None:
        _check_values(ids, counts, shares, sets.token_ids.shape[-1], vocab_size)
    return sets


def _check_values(
    ids: np.ndarray | None, counts: np.ndarray, shares: np.ndarray | None, width: int, vocab: int
) -> None:
    """Refuse values of sets that cannot be; those that are None are not known."""
    if (wrong := (counts < KEPT_MANY) | (counts > width)).any():
        place = _first(wrong)
        raise ValueError(
            f"kept.counts has {counts[place]} at {_shown(place)}: give the number of the row's "
            f"ids, at most the {width} columns of kept.token_ids; {KEPT_ALL} where nothing was "
            f"cut, {KEPT_MANY} where a share stands for the ids, or 0 where there is no token"
        )
    if shares is not None and (wrong := (counts < 0) & (shares > SHARE_ROUNDING)).any():
        place = _first(wrong)
        raise ValueError(
            f"kept.log_kept has {shares[place]:g} at {_shown(place)}: give the log of the kept "
            "tokens' share, at most 0"
        )
    if ids is None:
        return
    is_listed = np.arange(width) < counts[..., None]
    if (wrong := is_listed & ((ids < 0) | (ids >= vocab))).any():
        place = _first(wrong)
        raise ValueError(
            f"kept.token_ids has {ids[place]} at {_shown(place)}, outside the vocabulary (0 to "
            f"{vocab - 1}): give rollout and learner one vocabulary"
        )
    ids = np.where(is_listed, ids, vocab + np.arange(width))
    if (ids[..., 1:] > ids[..., :-1]).all():  # as records have them
        return
    ids = np.sort(ids, axis=-1)
    if (twice := ids[..., 1:] == ids[..., :-1]).any():
        place = _first(twice)
        raise ValueError(
            f"kept.token_ids names {ids[place]} twice in row {_shown(place[:-1])}: name each token "
            "of a set once"
        )


def check_digests(
    digests: UInt32[_AnyArray, "*rows 2"], rollout_digests: _AnyArray
) -> Bool[Array, "*rows"]:
    """Which rows have the logits that a rollout had: refused where one is known to have others.

    Args:
      digests: the learner's, `row_digests` of its logits, `[*rows, 2]`.
      rollout_digests: the rollout's, `[*rows]` uint64 as records and columns have them, or their
        words, `[*rows, 2]` uint32. A row whose digest is 0 has none, and counts as the same.

    Returns:
      `[*rows]` bool; under `jax.jit` some may be False.

    Raises:
      TypeError: they are no digests.
      ValueError: they are of other rows; or, where they are known, of logits of other dtypes or of
        other logits.
    """
    row_words = digest_words("digests", digests)
    words = digest_words("rollout_digests", rollout_digests, row_words.shape[:-1])
    for dtype in _dtypes(digests):
        _check_dtype(rollout_digests, dtype)
    same, is_digest = compiled(_same_rows)(row_words, words)
    values, compared = known_values(same), known_values(is_digest)
    if values is not None and compared is not None and not values.all():
        raise ValueError(
            f"{int((~values).sum())} of {int(compared.sum())} rows have other logits than the "
            f"rollout, the first at {_shown(_first(~values))}: other weights, tokens, tiles, "
            "devices or another jax made them, so ratios are not 1. Leave the digests out to go "
            "on, or compare rows by `equal_digests`"
        )
    return same


def _same_rows(
    words: UInt32[Array, "*rows 2"], rollout_words: UInt32[Array, "*rows 2"]
) -> tuple[Bool[Array, "*rows"], Bool[Array, "*rows"]]:
    """Which rows have equal digests, or none of a rollout; and which have one of it."""
    is_digest = rollout_words[..., 0] & CODE > 0
    return (words == rollout_words).all(-1) | ~is_digest, is_digest


def check_rollout_rows(
    logits: Float[Array, "*rows V"], rollout_digests: _AnyArray | None
) -> Bool[Array, "*rows"] | None:
    """`check_digests` of logits, all of which it reads once; None without digests."""
    if rollout_digests is None:
        return None
    rows = logits.shape[:-1]
    words = digest_words("row_digests", rollout_digests, rows)
    _check_dtype(rollout_digests, logits.dtype.name)
    row_words = row_digests(logits.reshape(-1, logits.shape[-1])).reshape(*rows, 2)
    return check_digests(row_words, words)


def flagged(
    logprobs: Float32[Array, "*rows"], same: Bool[Array, "*rows"] | None
) -> Float32[Array, "*rows"]:
    """The logprobs, NaN in rows that are not the same."""
    return logprobs if same is None else jnp.where(same, logprobs, jnp.nan)


def digest_words(
    name: str, digests: _AnyArray, rows: tuple[int, ...] | None = None
) -> UInt32[Array, "*rows 2"]:
    """Digests of these rows, or of any, as two words each."""
    check_type(name, digests, (np.ndarray, jax.Array), "a NumPy or JAX array of digests")
    if digests.dtype == np.uint64 and rows in (None, digests.shape):
        if isinstance(digests, np.ndarray):
            return jnp.asarray(np.ascontiguousarray(digests).astype("<u8")[..., None].view("<u4"))
        return lax.bitcast_convert_type(digests, jnp.uint32)
    is_words = digests.dtype == np.uint32 and digests.shape[-1:] == (2,)
    if is_words and rows in (None, digests.shape[:-1]):
        return jnp.asarray(digests)
    kind = TypeError if digests.dtype not in (np.uint32, np.uint64) else ValueError
    of_rows, of_words = (rows, (*rows, 2)) if rows is not None else ("[*rows]", "[*rows, 2]")
    raise kind(
        f"{name} is {digests.dtype} {digests.shape}: give uint64 {of_rows}, as records and columns "
        f"have them, or their words, uint32 {of_words}. Into `jax.jit` go words, "
        '`digests.view("<u4").reshape(*digests.shape, 2)`: it cuts uint64 to 32 bits'
    )


def _dtypes(digests: _AnyArray) -> list[str]:
    """The dtypes of the logits that digests are of, where they are known."""
    values = known_values(digests)
    if values is None:
        return []
    low = values if values.dtype == np.uint64 else values[..., 0]
    codes = np.unique(low & low.dtype.type(CODE)).tolist()
    return [DTYPES[code - 1] for code in codes if code]


def _check_dtype(rollout_digests: _AnyArray, dtype: str) -> None:
    """Refuse a rollout's digests of logits of another dtype, where they are known."""
    if others := [name for name in _dtypes(rollout_digests) if name != dtype]:
        raise ValueError(
            f"the rollout's digests are of {others[0]} logits and these are {dtype}: no bits of "
            "theirs can be equal. Compute both in one dtype, or leave the digests out"
        )


def _first(wrong: np.ndarray) -> tuple[int, ...]:
    return tuple(np.argwhere(wrong)[0].tolist())


def _shown(place: tuple[Any, ...]) -> str:
    return f"[{', '.join(map(str, place))}]"
