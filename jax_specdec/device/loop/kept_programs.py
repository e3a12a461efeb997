"""The programs of a worker: those of each kind of batch apart, so that they can be dropped.

JAX keeps what it compiles with the function that `jax.jit` returned. One such function for all
kinds would keep every program for ever.
"""

import weakref
from collections import OrderedDict

from jax.stages import Wrapped

from jax_specdec.device.loop.kinds import Kind, PromptKind, StepKey
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig

MOST_KINDS = 64  # of batches and prompts together


class KeptPrograms(Compiled):
    """The loop's functions, and for each of the last kinds functions of its own.

    A step depends on less than its messages do: kinds that need the same one share it.
    """

    def __init__(self, config: LoopConfig, most: int = MOST_KINDS) -> None:
        """Begin with no kind.

        Args:
          config: of the loop.
          most: kinds whose programs are kept; those that were used longest ago are dropped.
        """
        super().__init__(config)
        self._most = most
        self._kinds: OrderedDict[Kind | PromptKind, Compiled] = OrderedDict()
        self._steps: weakref.WeakValueDictionary[StepKey, Wrapped] = weakref.WeakValueDictionary()
        self._ready: set[Kind | PromptKind] = set()

    def for_kind(self, kind: Kind | PromptKind) -> Compiled:
        """The functions of a kind, which is used now."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = Compiled(self.config)
            found.seen, found.forward_rows = self.seen, self.forward_rows  # of all kinds
            if isinstance(kind, Kind):
                name = "choose" if kind.has_grammar else "step"
                own = getattr(found, name)
                setattr(found, name, self._steps.setdefault(kind.step_key, own))
        self._kinds.move_to_end(kind)
        while len(self._kinds) > self._most:
            self._ready.discard(self._kinds.popitem(last=False)[0])
        return found

    def be_ready(self, kind: Kind | PromptKind) -> None:
        """Note that the programs of a kind have been compiled, if they are still kept."""
        if kind in self._kinds:
            self._ready.add(kind)

    def is_ready(self, kind: Kind | PromptKind) -> bool:
        """Whether all programs of a kind have been compiled."""
        return kind in self._ready

    @property
    def ready(self) -> list[Kind]:
        """The kinds of batches whose programs have been compiled."""
        return [kind for kind in self._ready if isinstance(kind, Kind)]
