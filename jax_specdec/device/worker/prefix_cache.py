"""Which slots' caches hold what a prompt needs: prompts that begin alike are run once.

A cache entry of a position is a function of the tokens up to it and, for a drafter's cache, of the
token after it. Its bits are also a function of the program that made it. So a prompt takes over
whole chunks only, made by prefill chunks at the same places: each further chunk is then the program
that would have run anyway, on the same bits, and no value changes. What a decode step has written
(emitted tokens, rejected drafts) lies behind those chunks, and is never taken over.

A slot that its request has left still holds its chunks, until the next prompt is put into it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass
class _Prompt:
    """The prompt that was put into a slot last."""

    keys: tuple[bytes, ...] = ()  # one a chunk, equal where the prompts are equal up to its end
    most: int = 0  # chunks that may be taken over
    held: int = 0  # chunks that the slot's caches hold


class PrefixCache:
    """The contents of B slots' caches, in chunks of one size; decides, and copies nothing.

    Its decisions follow from its calls alone, so processes that share a model decide the same.
    """

    def __init__(self, num_slots: int, chunk: int) -> None:
        self._chunk = chunk
        self._prompts = [_Prompt() for _ in range(num_slots)]
        self.holders: dict[bytes, set[int]] = {}  # by key, the slots whose caches hold the chunk
        self.reused = 0  # prompt tokens so far that were not run

    def admit(self, slot: int, token_ids: Sequence[int]) -> int:
        """Put a prompt into `slot`, in place of what was there.

        Args:
          slot: its number.
          token_ids: of the prompt; empty for one that neither takes entries over nor offers any.

        Returns:
          How many of its tokens need not run, because the slot's last prompt began with them.
        """
        before = self._prompts[slot]
        prompt = _Prompt(_keys(token_ids, self._chunk), max(len(token_ids) - 2, 0) // self._chunk)
        common = 0
        for old, new in zip(before.keys[: before.held], prompt.keys[: prompt.most], strict=False):
            if old != new:
                break
            common += 1
        for key in before.keys[common : before.held]:
            self.holders[key].remove(slot)
            if not self.holders[key]:
                del self.holders[key]
        prompt.held = common
        self._prompts[slot] = prompt
        self.reused += common * self._chunk
        return common * self._chunk

    def longest(self, slot: int) -> tuple[int, int]:
        """The slot whose caches hold most of the prompt in `slot`.

        Returns:
          A slot (`slot` itself where no other one holds more), and how many tokens of the prompt
          its caches hold: whole chunks, and not the last one, which has to run as it starts the
          decoding.
        """
        prompt = self._prompts[slot]
        for count in range(prompt.most, prompt.held, -1):
            holders = self.holders.get(prompt.keys[count - 1])
            if holders:
                return min(holders), count * self._chunk
        return slot, prompt.held * self._chunk

    def hold(self, slot: int, num_tokens: int, *, reused: bool = False) -> None:
        """Note that the caches of `slot` hold the first `num_tokens` positions of its prompt.

        Args:
          slot: its number.
          num_tokens: may be beyond the end of the prompt, as a chunk is.
          reused: they were copied from another slot.
        """
        prompt = self._prompts[slot]
        held = min(num_tokens // self._chunk, len(prompt.keys))
        for key in prompt.keys[prompt.held : held]:
            self.holders.setdefault(key, set()).add(slot)
        if reused:
            self.reused += (held - prompt.held) * self._chunk
        prompt.held = max(held, prompt.held)


def _keys(token_ids: Sequence[int], chunk: int) -> tuple[bytes, ...]:
    """A key for each chunk of a prompt: of all tokens up to the one after the chunk.

    256 bits of BLAKE2: no known attack makes two of them collide, so a sender of prompts cannot
    reach the entries of another's.
    """
    ids = np.asarray(token_ids, np.int32)
    digest, keys, done = hashlib.blake2b(digest_size=32), [], 0
    for end in range(chunk + 1, len(ids) + 1, chunk):
        digest.update(ids[done:end].tobytes())
        keys.append(digest.digest())
        done = end
    return tuple(keys)
