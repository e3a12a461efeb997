"""Drawing where few tokens are kept: among the read's candidates, without any groups.

A cut keeps a prefix of the tokens in descending order. Where top-k gives all of them as candidates,
or fewer are kept than `num_candidates` says, Gumbel-max over these draws from exactly their
distribution. How many a row keeps depends on the row and its request alone, and so does which way
it goes: not on what the read found for its company.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import MANY_CANDIDATES
from pallas_kernels.sampling.parameters import Sampling, Truncation, truncates
from pallas_kernels.sampling.random_draws import RECOVER, Source, best, gumbel
from pallas_kernels.sampling.row_read import RowRead, num_candidates, scaled


def keeps_few(
    read: RowRead, cut: Truncation, sampling: Sampling, vocab_size: int
) -> Bool[Array, " N"]:
    """Which rows keep no token but candidates.

    Args:
      read: of the rows.
      cut: of each.
      sampling: of each.
      vocab_size: V.
    """
    asked = truncates(sampling)
    if vocab_size <= MANY_CANDIDATES:
        return asked
    last = num_candidates(sampling, vocab_size)[:, None] - 1
    ids, logits = (jnp.take_along_axis(x, last, axis=1) for x in (read.top_ids, read.top_logits))
    more = (cut.keeps(logits, ids) & (ids >= 0))[:, 0]  # perhaps
    by_k = (sampling.top_k > 0) & (sampling.top_k <= MANY_CANDIDATES)
    return asked & (by_k | ~more)


def draw_among(
    read: RowRead,
    rows: Int32[Array, " B"],
    cut: Truncation,
    taken_ids: Int32[Array, "B M"],
    source: Source,
) -> tuple[Float32[Array, " B"], Int32[Array, " B"]]:
    """The score and the id of a kept candidate of each row, not one that is taken.

    Scores are logarithms of weights exp((x - m) / T), plus noise of (source, token id).

    Args:
      read: of all rows.
      rows: those to draw from.
      cut: [B].
      taken_ids: -1 where there is none.
      source: [B], of the noise.
    """
    ids, x = (part[rows, :MANY_CANDIDATES] for part in (read.top_ids, read.top_logits))
    taken = (ids[:, :, None] == taken_ids[:, None, :]).any(axis=2)
    kept = cut.keeps(x, ids) & (ids >= 0) & ~taken
    gap = scaled(x, read.largest[rows][:, None], read.inverse[rows][:, None])
    return best(jnp.where(kept, gap + gumbel(source, RECOVER, ids), -jnp.inf), ids)
