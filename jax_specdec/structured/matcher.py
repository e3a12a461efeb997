"""One text's place in its grammar, and the tokens that may follow.

Axes: S positions of a step, W words of a bit mask of the vocabulary.
"""

import random
from collections.abc import Sequence

import numpy as np

from jax_specdec.requests import RequestError, Structured
from jax_specdec.structured.grammar import grammar_of, library, refused
from jax_specdec.structured.vocabulary import MASK_WORD, Vocabulary

ITEMS = 20_000  # that may be read at one place: an object of 5,000 optional keys has so many
TEXTS, TOKENS = 4, 8  # that are tried before a structure is served
FUEL = 100_000  # of llguidance for a regular expression: with its 1,000,000, masks take seconds
EVERY = np.int32(-1)  # a word that allows its tokens


class Matcher:
    """A text that grows token by token, and the masks of its next tokens.

    What llguidance computes for a mask is bounded: beyond, and where no token may follow, there is
    an error, and the text cannot go on.

    Attributes:
      num_tokens: of the text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        structured: Structured,
        stop_token_ids: Sequence[int],
        token_ids: Sequence[int] = (),
    ) -> None:
        """Compile a grammar, and begin behind `token_ids` of a text.

        Args:
          vocabulary: of the model.
          structured: what the text must be.
          stop_token_ids: the request's; those that are no text may come where it may end.
          token_ids: the beginning of the text.

        Raises:
          RequestError: it cannot be compiled, nothing may follow, or there is no such token.
        """
        lib = library()
        self._kind, self._vocabulary = structured.kind, vocabulary
        self._ends = vocabulary.ends(stop_token_ids)
        self._over, self.num_tokens = False, 0
        limits = lib.LLParserLimits(
            initial_lexer_fuel=FUEL, max_items_in_row=ITEMS, verbose_errors=False
        )
        self._matcher = lib.LLMatcher(
            vocabulary.tokenizer, grammar_of(structured), log_level=0, limits=limits
        )
        self._check()
        self.take(token_ids)
        self.fill(np.empty((1, vocabulary.num_words), np.int32), ())

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens; nothing counts after one that ends the text.

        Raises:
          RequestError: they are not of the grammar.
        """
        self.num_tokens += len(token_ids)
        for token_id in token_ids:
            self._over = self._over or token_id in self._ends
            if self._over:
                return
            self._consume(token_id)

    def fill(self, masks: np.ndarray, drafts: Sequence[int]) -> int:
        """Write which tokens may come now, and behind each draft.

        Args:
          masks: [S, W] int32, S more than the drafts: bit j of word w of row s allows id 32 w + j
            behind drafts 0..s-1. Rows behind a draft that is forbidden, or ends the text, allow
            everything: no token of theirs is ever emitted.
          drafts: tokens that may come next, one after the other.

        Returns:
          How many of the drafts the grammar allows.

        Raises:
          RequestError: no token may come.
        """
        masks[:] = EVERY
        if self._over:
            return len(drafts)
        legal = taken = 0
        self._fill_one(masks[0])
        for row, draft in zip(masks[1:], drafts, strict=False):
            if not masks[legal, draft // MASK_WORD] >> draft % MASK_WORD & 1:
                break
            legal += 1
            if draft in self._ends:
                legal = len(drafts)
                break
            self._consume(draft)
            taken += 1
            self._fill_one(row)
        if taken and not self._matcher.rollback(taken):
            self._check()
        return legal

    def try_texts(self) -> None:
        """Go some tokens on, in several ways; the text is as before.

        Raises:
          RequestError: none of them goes on: nor would any text, whatever a model writes.
        """
        error: RequestError | None = None
        for seed in range(TEXTS):
            try:
                self._try_text(random.Random(seed))
                return
            except RequestError as why:
                error = why
        assert error is not None
        raise error

    def _try_text(self, chance: random.Random) -> None:
        """Go on by allowed tokens, in a copy."""
        saved, self._matcher = self._matcher, self._matcher.deep_copy()
        try:
            mask = np.empty(self._vocabulary.num_words, np.int32)
            for _ in range(TOKENS):
                self._fill_one(mask)
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                bits[list(self._ends)] = 0
                allowed = np.flatnonzero(bits)
                if not allowed.size:  # it ends here
                    return
                self._consume(int(allowed[chance.randrange(allowed.size)]))
        finally:
            self._matcher = saved

    def _fill_one(self, mask: np.ndarray) -> None:
        """The mask [W] at this place; the ends of this request stand for the vocabulary's own."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        words, end = mask.view(np.uint32), self._vocabulary.end
        if words[end // MASK_WORD] >> end % MASK_WORD & 1:
            words[end // MASK_WORD] &= ~_bit(end)
            for id in self._ends:
                words[id // MASK_WORD] |= _bit(id)
        if not mask.any():
            raise refused(self._kind, "no token of the model may come here")

    def _consume(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = self._matcher.get_error().removesuffix("<non-verbose/>").strip()
            has_no_extension = why.startswith("NoExtension")
            raise refused(
                self._kind, f"no token may come next ({why})" if has_no_extension else why
            )


def _bit(token_id: int) -> np.uint32:
    return np.uint32(1 << token_id % MASK_WORD)
