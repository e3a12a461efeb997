"""A shared text that drafts may be copied from, sorted once on the host, without jax.

Drafting asks: which places of the corpus follow the longest suffix of a request's text? Sorted by
their contexts read backwards, those places are neighbors, and one binary search finds them all: a
suffix array of the reversed text.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

SEPARATOR = -1  # between documents: contexts and continuations end there


@dataclass(frozen=True)
class Corpus:
    """Documents and their order. Two corpora of equal content are equal, and hash alike.

    So a drafter that holds one can be a static argument: `digest` stands for the arrays.
    """

    digest: str
    max_context: int  # M: the longest match that can be found
    text: np.ndarray = field(compare=False, repr=False)
    """[N] int32: SEPARATOR, then each document followed by SEPARATOR."""

    order: np.ndarray = field(compare=False, repr=False)
    """[P] int32: every place of `text` with a token and one before it, sorted by the tokens before
    it, nearest first, at least M of them; of equal contexts the earlier place is first."""

    @classmethod
    def of(cls, documents: Iterable[np.ndarray], *, max_context: int = 32) -> "Corpus":
        """Sort `documents`.

        This takes a few sorts of all places: seconds and 100 bytes a token for some millions.

        Args:
          documents: token ids [n] each, from 0 to 2^31 - 1; an empty document adds nothing.
          max_context: M.

        Raises:
          ValueError: an id is outside that range, a document is not a list, the places of all
            documents do not fit int32, or M < 1.
        """
        if max_context < 1:
            raise ValueError(f"max_context = {max_context} must be at least 1")
        parts = [np.array([SEPARATOR], np.int32)]
        for index, document in enumerate(documents):
            parts += [_checked(np.asarray(document), index), parts[0]]
        text = np.concatenate(parts)
        if text.size >= 2**31:
            raise ValueError(
                f"a corpus of {text.size} tokens is over the limit {2**31 - 1}: leave documents out"
            )
        digest = hashlib.sha256(text.tobytes()).hexdigest()
        text.flags.writeable = False
        order = _sorted_places(text, max_context)
        order.flags.writeable = False
        return cls(digest, max_context, text, order)


def _checked(document: np.ndarray, index: int) -> np.ndarray:
    if document.ndim != 1 or (document.size and document.dtype.kind not in "iu"):
        raise ValueError(
            f"document {index} has shape {document.shape} and type {document.dtype}: "
            "token ids are a list of integers"
        )
    if document.size and not 0 <= document.min() <= document.max() < 2**31:
        raise ValueError(
            f"document {index} has ids from {document.min()} to {document.max()}: "
            f"token ids are from 0 to {2**31 - 1}"
        )
    return document.astype(np.int32)


def _sorted_places(text: np.ndarray, max_context: int) -> np.ndarray:
    """The places that have a context, sorted by it, by prefix doubling.

    `rank[i]` orders place i by the `depth` tokens before it; two ranks, `depth` apart, make the
    rank for twice the depth. Source: Manber and Myers, "Suffix arrays", 1990.
    """
    places = np.arange(text.size)
    rank = np.unique(np.concatenate([[SEPARATOR], text[:-1]]), return_inverse=True)[1]
    rank = rank.astype(np.int64)
    depth = 1
    while depth < max_context:
        further = np.concatenate([np.full(min(depth, text.size), -1), rank[:-depth]]) + 1
        rank = np.unique(rank * (text.size + 1) + further, return_inverse=True)[1].astype(np.int64)
        depth *= 2
    has_context = (text >= 0) & (np.concatenate([[SEPARATOR], text[:-1]]) >= 0)
    places = places[has_context]
    return places[np.argsort(rank[has_context], kind="stable")].astype(np.int32)
