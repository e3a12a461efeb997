"""Strings that end a text: where, and how much of it is certain meanwhile.

The text ends where the first of them is complete, character by character. So its end depends on the
text alone, and not on the tokens or the steps in which the text came.
"""

from collections.abc import Sequence


class StopStrings:
    """One text as it comes, up to the first of some strings.

    Attributes:
      text: what has come, also behind the end.
      found: the string that ended it; None until one did.
      end: characters before that string, or with it where it is kept; None until one was found.
    """

    def __init__(self, strings: Sequence[str], *, keep: bool) -> None:
        """Begin with an empty text.

        Args:
          strings: none of them empty.
          keep: the string itself belongs to the text.
        """
        self.text = ""
        self.found: str | None = None
        self.end: int | None = None
        self._strings, self._keep = tuple(strings), keep

    def push(self, text: str, *, may_end: bool = True) -> None:
        """Add what comes next; nothing changes behind the end.

        Args:
          text: characters.
          may_end: the text may end here. Otherwise a string that these characters complete is none;
            one that they begin may be completed by later ones.
        """
        if self.end is not None:
            return
        before = len(self.text)
        self.text += text
        if not may_end:
            return
        # The one that is complete first; of two that are so together, the longer one.
        places = [
            (self.text.find(stop, max(before - len(stop) + 1, 0)), stop) for stop in self._strings
        ]
        ends = [(at + len(stop), -len(stop), stop) for at, stop in places if at >= 0]
        if ends:
            behind, _, self.found = min(ends)
            self.end = behind if self._keep else behind - len(self.found)

    @property
    def certain(self) -> int:
        """Characters that stay, whatever comes: no string can begin among them any more."""
        if self.end is not None:
            return self.end
        begun = (
            length
            for stop in self._strings
            for length in range(len(stop))
            if self.text.endswith(stop[:length])
        )
        return len(self.text) - max(begun, default=0)
