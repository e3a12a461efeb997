"""Taking one unit of a semaphore: block, spin, or predict when it will come.

    block    sleep in the kernel; waking a sleeping core costs 45-70 us
    spin     look at the semaphore all the time; the least latency, one core at 100 %
    predict  sleep until shortly before the unit is expected (`ipc.rhythm`), then spin for a
             bounded time, then sleep: nearly the latency of spinning, for about LEAD_NS of CPU
             time per message, or up to a sixteenth of the interval where long intervals vary.
             Until it has seen that a core is free (`ipc.free_cores`), it sleeps like `block`

Where cores are not free, spinning does harm: the scheduler takes the core from a side that has spun
for its share, for milliseconds, and a unit then comes just as late. A side that sleeps is woken at
once, as it has used nothing. So a side begins asleep, spins once a core was free for a while, and
sleeps again after it lost its core while it spun.

Every wait proceeds in slices of at most SLICE_NS; between two slices it asks the caller's
`obstacle` whether the peer is gone. All times are of CLOCK_MONOTONIC (`ipc.semaphore`): nothing
that happens to the wall clock changes a wait.

Signals. A handler of the host program runs as soon as a signal ends the sleep, or after the slice
where another thread got the signal. Its exception can surface after any call. To lose no unit
there, C code takes the unit and stores it in `held` before the interpreter looks at signals again.
"""

import os
from collections.abc import Callable
from itertools import repeat
from time import monotonic_ns
from typing import Literal

import posix_ipc

from ipc.free_cores import FreeCores
from ipc.rhythm import NEVER, Rhythm
from ipc.semaphore import Semaphore

WaitPolicy = Literal["predict", "block", "spin"]
POLICIES: tuple[WaitPolicy, ...] = ("predict", "block", "spin")

SLICE_NS = 20_000_000  # a peer's death is noticed within one slice
LOST_CORE_NS = 200_000  # between two looks at the clock: something else ran on the core
LOOK_NS = 1_000_000  # while spinning, ask about obstacles this often
GLANCES = 20  # looks at the semaphore between two looks at the clock
AFFINITY_NS = 500_000_000  # ask this often whether both sides are confined to one core

_NOW = (0,)


def check_policy(policy: str) -> None:
    """Raises ValueError for an unknown policy."""
    if policy not in POLICIES:
        raise ValueError(f"wait is {policy!r}, but must be one of {', '.join(POLICIES)}")


def deadline_after(timeout: float | None) -> int | None:
    """Turns seconds from now into a CLOCK_MONOTONIC time in ns; None has no deadline."""
    if timeout is None:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout}, but must be at least 0 seconds, or None")
    return monotonic_ns() + int(min(timeout, 1e9) * 1e9)


class Waiter:
    """Takes units of one semaphore for one side of a ring.

    Attributes:
      held: an item for each unit that was taken and not yet used. It outlives an interrupted call.
      waits: how often no unit was there at once.
      wait_ns: time spent waiting since the start.
    """

    def __init__(
        self,
        semaphore: Semaphore,
        policy: WaitPolicy,
        obstacle: Callable[[], Exception | None],
        peer_shares: Callable[[set[int]], bool] = lambda cores: True,
    ) -> None:
        """Starts to wait for units of `semaphore`.

        Args:
          semaphore: whose units to take.
          policy: how to wait.
          obstacle: returns why waiting is hopeless, or None.
          peer_shares: says whether the peer can run on none but these cores.
        """
        self.held: list[object] = []
        self.waits = 0
        self.wait_ns = 0
        self._semaphore = semaphore
        self._acquire = semaphore.acquire
        self.policy = policy
        self.obstacle = obstacle
        self.peer_shares = peer_shares
        self.rhythm = Rhythm()
        self.cores = FreeCores()
        self._one_core = False
        self._affinity_until = 0

    def grab(self) -> bool:
        """Takes a unit if one is there; never waits."""
        # The value is only a hint. It saves the cost of an exception when no unit is there.
        if not self._semaphore.value:
            return False
        try:
            self.held.extend(map(self._acquire, _NOW))
        except posix_ipc.BusyError:
            return False
        return True

    def gather(self, limit: int) -> None:
        """Takes every unit that is there, up to `limit`; never waits."""
        count = min(self._semaphore.value, limit)
        if count > 0:
            try:
                self.held.extend(map(self._acquire, repeat(0, count)))
            except posix_ipc.BusyError:
                return
            self.rhythm.unwaited += count

    def take(self, deadline_ns: int | None) -> bool:
        """Takes a unit, waiting until `deadline_ns` (None: no deadline); False when time is up.

        Raises what `obstacle` returned, unless a unit was still there.
        """
        if self.held:
            return True
        if self._semaphore.value:  # grab(), written out: this is the hot path
            try:
                self.held.extend(map(self._acquire, _NOW))
            except posix_ipc.BusyError:
                pass
            else:
                self.rhythm.unwaited += 1
                return True
        self.waits += 1
        started = monotonic_ns()
        try:
            return self._wait(started, NEVER if deadline_ns is None else deadline_ns)
        finally:
            ended = monotonic_ns()
            self.wait_ns += ended - started
            if self.held:
                self.rhythm.came(ended)

    def _wait(self, now: int, deadline: int) -> bool:
        window = self.spin_window(now)
        while True:
            if now < deadline and self._wait_a_slice(now, deadline, window):
                return True
            problem = self.obstacle()
            if problem is not None:
                # What was committed before the peer's end is visible now: deliver it first.
                if self.grab():
                    return True
                raise problem
            now = monotonic_ns()
            if now >= deadline:
                return self.grab()
            window = self.spin_window(now)  # it is over if the core was lost

    def _wait_a_slice(self, now: int, deadline: int, window: tuple[int, int]) -> bool:
        spin_from, spin_until = window
        if spin_from <= now < spin_until:
            return self.spin(min(now + LOOK_NS, spin_until, deadline))
        end = min(now + SLICE_NS, deadline)
        if now < spin_from:
            end = min(end, spin_from)
        return self._sleep(end)

    def spin_window(self, now: int) -> tuple[int, int]:
        if self.policy == "predict":
            window = self.rhythm.window(now)  # which also learns
            return window if self.cores.look(now) else (NEVER, NEVER)
        return (0, NEVER) if self.policy == "spin" else (NEVER, NEVER)

    def spin(self, until_ns: int) -> bool:
        semaphore = self._semaphore
        alone = self._on_one_core()
        now = monotonic_ns()
        while now < until_ns:
            for _ in range(GLANCES):
                if taken := bool(semaphore.value and self.grab()):
                    break
            else:
                if alone:
                    os.sched_yield()
            looked, now = now, monotonic_ns()
            if now - looked > LOST_CORE_NS:
                self.cores.lost(now)
                self.rhythm.close_window()
                return taken
            if taken:
                return True
        return False

    def _on_one_core(self) -> bool:
        # Yielding lets the peer run when both sides are pinned to one core. Elsewhere it would give
        # whole time slices to other programs: 100 times the latency on a busy machine.
        now = monotonic_ns()
        if now >= self._affinity_until:
            self._affinity_until = now + AFFINITY_NS
            cores = os.sched_getaffinity(0)
            self._one_core = len(cores) == 1 and self.peer_shares(cores)
        return self._one_core

    def _sleep(self, until_ns: int) -> bool:
        try:
            self.held.extend(self._semaphore.waiting(until_ns))
        except posix_ipc.BusyError:
            return False
        return bool(self.held)
