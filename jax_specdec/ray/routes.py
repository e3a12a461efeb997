"""Which replica gets a request: pure bookkeeping of loads and of prompts' beginnings."""

import collections
from collections.abc import Iterator
from dataclasses import dataclass

ROUTE_MEMORY = 1 << 16  # beginnings of prompts that are remembered


@dataclass
class Load:
    """The work of a replica.

    Attributes:
      slots: requests that it decodes together.
      ahead: requests that it may hold beside those.
      open: requests that it has.
      tokens: prompt tokens that they came with, and those that they may still emit.
    """

    slots: int
    ahead: int
    open: int = 0
    tokens: int = 0

    @property
    def free(self) -> int:
        """Slots for which there is no request; negative where requests wait."""
        return self.slots - self.open

    @property
    def has_room(self) -> bool:
        """Whether it takes one more request."""
        return self.free + self.ahead > 0


class Routes:
    """The loads of the replicas that take requests, and where prompts' beginnings were sent."""

    def __init__(self, chunk: int) -> None:
        """Know no replica.

        Args:
          chunk: tokens of a prompt that a worker runs, and keeps, together.
        """
        self.loads: dict[int, Load] = {}
        self._bytes = 4 * chunk
        self._seen: collections.OrderedDict[int, int] = collections.OrderedDict()

    def choose(self, prompt: bytes) -> int | None:
        """The replica for a prompt of packed ids; None where all have as many as they may.

        A free slot counts most, then the longest beginning that the replica has seen, then more
        free slots, and at last fewer tokens.
        """
        best, score = None, (False, -1, 0, 0)
        prefix_lengths = self._chunks_seen(prompt)
        for replica, load in self.loads.items():
            if load.has_room:
                rank = (load.free > 0, prefix_lengths.get(replica, 0), load.free, -load.tokens)
                if best is None or rank > score:
                    best, score = replica, rank
        return best

    def add(self, replica: int, prompt: bytes, tokens: int) -> None:
        """Note that a replica gets a request of so many tokens."""
        load = self.loads[replica]
        load.open += 1
        load.tokens += tokens
        for key in self._keys(prompt):
            self._seen[key] = replica
            self._seen.move_to_end(key)
        while len(self._seen) > ROUTE_MEMORY:
            self._seen.popitem(last=False)

    def emitted(self, replica: int, tokens: int) -> None:
        """Note that a replica has that many tokens less to make."""
        if (load := self.loads.get(replica)) is not None:
            load.tokens -= tokens

    def end(self, replica: int, tokens: int) -> None:
        """Note that a request has left a replica, with so many tokens that it did not emit."""
        if (load := self.loads.get(replica)) is not None:
            load.open -= 1
            load.tokens -= tokens

    def forget(self, replica: int) -> None:
        """Send nothing more to a replica, whose caches are gone."""
        self.loads.pop(replica, None)
        for key in [key for key, at in self._seen.items() if at == replica]:
            del self._seen[key]

    def _chunks_seen(self, prompt: bytes) -> dict[int, int]:
        """For each replica the chunks of the prompt's beginning that it has seen."""
        lengths: dict[int, int] = {}
        for count, key in enumerate(self._keys(prompt), 1):
            replica = self._seen.get(key)
            if replica is None:
                break
            lengths[replica] = count
        return lengths

    def _keys(self, prompt: bytes) -> Iterator[int]:
        """One number for each beginning of whole chunks."""
        key = 0
        for end in range(self._bytes, len(prompt) + 1, self._bytes):
            key = hash((key, prompt[end - self._bytes : end]))
            yield key
