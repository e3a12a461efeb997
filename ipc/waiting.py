"""Taking one unit of a semaphore: block, spin, or predict when it will come.

    block    sleep in the kernel; a wake-up of a sleeping core costs 45-70 us
    spin     look at the semaphore all the time; the least latency, one core at 100 %
    predict  sleep until shortly before the unit is expected (the median of the last intervals),
             then spin for a bounded time, then sleep: nearly the latency of spinning, for the
             cost of LEAD_NS or so per message; of up to a sixteenth of the interval where long
             intervals vary

Under `predict`, a rehearsal may run in front of the spinning: something that brings into the caches
what will be needed once the unit is here. A core that slept, or whose neighbors were at work, has
lost it: then the same code takes five times as long.

Every wait proceeds in slices of at most SLICE_NS, between which the caller's `obstacle` is asked
whether the peer is gone. Deadlines are times of CLOCK_MONOTONIC. (posix_ipc waits on
CLOCK_REALTIME: setting the wall clock back by x can lengthen one slice by x, nothing else.)

Signals. posix_ipc runs Python's signal handlers inside its wait and swallows what they raise,
except KeyboardInterrupt: a handler's sys.exit would be lost. So signals are held back while the
thread sleeps, for at most one slice, and handlers run, and may raise, outside of posix_ipc.

What a handler raises can surface after any call. A unit must not get lost there, so it is taken
by C code that stores it in `held` before the interpreter looks at signals again.
"""

import _signal  # type: ignore[import-not-found]
import os
import signal
from collections.abc import Callable
from itertools import repeat
from time import monotonic_ns
from typing import Literal

import posix_ipc

WaitPolicy = Literal["predict", "block", "spin"]
POLICIES: tuple[WaitPolicy, ...] = ("predict", "block", "spin")

SLICE_NS = 20_000_000  # a peer's death is noticed within one slice
LOOK_NS = 1_000_000  # while spinning, ask about obstacles this often
LEAD_NS = 400_000  # wake up this long before the expected moment: timers and cores are late
LEAD_SHARE = 16  # at most this share of the interval, where the moment varies more than that:
LEAD_DEVIATIONS = 4  # so many median deviations
LAST_GAPS = 5  # of which the median is the interval
FIRST_REHEARSAL_NS = 500_000  # how long a rehearsal takes, until one was seen
REHEARSAL_DECAY = 1024  # what a wait takes off that length, where it is too long to be tried
FIRST_NS = 5_000_000  # the first interval is a guess: a decode step, or less
GLANCES = 20  # looks at the semaphore between two looks at the clock
AFFINITY_NS = 500_000_000  # ask this often whether the thread is confined to one core

_NOW = (0,)
_NEVER = 1 << 63
# Held back while asleep: everything except the signals that report this thread's own faults.
_HOST_SIGNALS = frozenset(signal.valid_signals()) - {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGABRT,
}
# The C function: signal.pthread_sigmask is a Python wrapper, at whose entry a handler may raise,
# between the sleep and the restoring of the mask, which would then stay in place for good.
_sigmask = _signal.pthread_sigmask


def _median(values: list[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]


def check_policy(policy: str) -> WaitPolicy:
    """Returns the policy. Raises ValueError for an unknown one."""
    for known in POLICIES:
        if policy == known:
            return known
    raise ValueError(f"wait is {policy!r}, but must be one of {', '.join(POLICIES)}")


def deadline_after(timeout: float | None) -> int | None:
    """Turns seconds from now into a CLOCK_MONOTONIC time in ns; None waits for ever."""
    if timeout is None:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout is {timeout}, but must be at least 0 seconds, or None")
    return monotonic_ns() + int(min(timeout, 1e9) * 1e9)


class Waiter:
    """Takes units of one semaphore for one side of a ring.

    Attributes:
      held: a None for each unit that is taken and not used. It outlives an interrupted call.
      waits: how often nothing was there at once.
      wait_ns: time spent waiting since the start.
    """

    def __init__(
        self,
        semaphore: posix_ipc.Semaphore,
        policy: WaitPolicy,
        obstacle: Callable[[], Exception | None],
    ) -> None:
        self.held: list[None] = []
        self.waits = 0
        self.wait_ns = 0
        self._semaphore = semaphore
        self._acquire = semaphore.acquire
        self._policy = policy
        self._obstacle = obstacle
        self._gaps: list[int] = []  # the last ones
        self._interval_ns = 0
        self._lead_ns = LEAD_NS
        self._rehearsal_ns = FIRST_REHEARSAL_NS
        self._gap_ns = 0  # between the last two units that were waited for, until it is learned
        self._last_ns = 0
        self._unwaited = 0  # units that were there at once, since _last_ns
        self._window = (_NEVER, _NEVER)  # in which to spin for the next unit
        self._window_of = (0, 0)  # _last_ns and _unwaited when it was chosen
        self._one_core = False
        self._affinity_until = 0

    def grab(self) -> bool:
        """Takes a unit if one is there; never waits."""
        # The value is a hint only. It saves the cost of an exception when nothing is there.
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
            self._unwaited += count

    def take(self, deadline_ns: int | None, rehearse: Callable[[], object] | None = None) -> bool:
        """Takes a unit, waiting until `deadline_ns` (None: for ever); False when time is up.

        Args:
          rehearse: called at most once, shortly before the unit is expected, if it is waited for
            that long; only where it is predicted. While it runs, neither the time nor `obstacle`
            is looked at.

        Raises what `obstacle` returned, unless a unit was still there; what `rehearse` raised.
        """
        if self.held:
            return True
        if self._semaphore.value:  # grab(), written out: this is the hot path
            try:
                self.held.extend(map(self._acquire, _NOW))
            except posix_ipc.BusyError:
                pass
            else:
                self._unwaited += 1
                return True
        return self._wait(deadline_ns, rehearse)

    def _wait(self, deadline_ns: int | None, rehearse: Callable[[], object] | None) -> bool:
        self.waits += 1
        now = started = monotonic_ns()
        deadline = _NEVER if deadline_ns is None else deadline_ns
        spin_from, spin_until = self._spin_window(now)
        rehearse_at = _NEVER
        if rehearse is not None and now < spin_from <= deadline:
            if spin_from - self._rehearsal_ns > now:  # else it would be late
                rehearse_at = spin_from - self._rehearsal_ns
            elif self._rehearsal_ns > FIRST_REHEARSAL_NS:
                # What took too long for a while must be tried again.
                self._rehearsal_ns -= self._rehearsal_ns // REHEARSAL_DECAY
        try:
            while True:
                if rehearse is not None and rehearse_at <= now:
                    rehearse_at = _NEVER
                    # A core that woke late has no time for it: the unit may be there already.
                    if now < spin_from and not self._semaphore.value:
                        rehearse()
                        begun, now = now, monotonic_ns()
                        # One that was held up must not spoil the estimate for those after it.
                        lasted = min(now - begun, 2 * self._rehearsal_ns)
                        self._rehearsal_ns += (lasted - self._rehearsal_ns) // 4
                taken = False
                if spin_from <= now < spin_until and now < deadline:
                    taken = self._spin(min(now + LOOK_NS, spin_until, deadline))
                elif now < deadline:
                    end = min(now + SLICE_NS, deadline)
                    if now < spin_from:
                        end = min(end, spin_from, rehearse_at)
                    taken = self._sleep((end - now) * 1e-9)
                if taken:
                    return True
                problem = self._obstacle()
                if problem is not None:
                    # What was committed before the peer's end is visible now: deliver it first.
                    if self.grab():
                        return True
                    raise problem
                now = monotonic_ns()
                if now >= deadline:
                    return self.grab()
        finally:
            ended = monotonic_ns()
            self.wait_ns += ended - started
            if self.held:
                self._gap_ns = (ended - self._last_ns) // (self._unwaited + 1)
                self._last_ns = ended
                self._unwaited = 0

    def _spin_window(self, now: int) -> tuple[int, int]:
        if self._policy == "spin":
            return 0, _NEVER
        if self._policy == "block" or self._last_ns == 0:
            return _NEVER, _NEVER
        # Once for each unit: who waits for it in many short calls must not spin in each of them.
        unit = (self._last_ns, self._unwaited)
        if unit != self._window_of:
            self._window, self._window_of = self._choose_window(now), unit
        return self._window

    def _choose_window(self, now: int) -> tuple[int, int]:
        # Learned here, while there is nothing else to do, and not when a unit has just come.
        if self._gap_ns:
            gap = self._gap_ns if self._gaps else min(self._gap_ns, FIRST_NS)
            self._gaps = [*self._gaps[1 - LAST_GAPS :], gap]
            self._gap_ns = 0
            # A pause between requests does not move a median, and a new rhythm soon does.
            self._interval_ns = _median(self._gaps)
            deviation = _median([abs(gap - self._interval_ns) for gap in self._gaps])
            lead = min(LEAD_DEVIATIONS * deviation, self._interval_ns // LEAD_SHARE)
            self._lead_ns = max(LEAD_NS, lead)
        lead = self._lead_ns
        expected = self._last_ns + self._interval_ns * (self._unwaited + 1)
        start = max(now, expected - lead)
        return start, start + 2 * lead

    def _spin(self, until_ns: int) -> bool:
        semaphore = self._semaphore
        alone = self._on_one_core()
        while monotonic_ns() < until_ns:
            for _ in range(GLANCES):
                if semaphore.value and self.grab():
                    return True
            if alone:
                os.sched_yield()
        return False

    def _on_one_core(self) -> bool:
        # Yielding lets the peer run when both sides are pinned to one core. Elsewhere it would hand
        # whole time slices to strangers: 100 times the latency on a busy machine.
        now = monotonic_ns()
        if now >= self._affinity_until:
            self._affinity_until = now + AFFINITY_NS
            self._one_core = len(os.sched_getaffinity(0)) == 1
        return self._one_core

    def _sleep(self, seconds: float) -> bool:
        mask = _sigmask(signal.SIG_BLOCK, ())
        try:
            _sigmask(signal.SIG_BLOCK, _HOST_SIGNALS)
            self.held.extend(map(self._acquire, (seconds,)))
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        finally:
            _sigmask(signal.SIG_SETMASK, mask)  # pending handlers run here, and may raise
        return True
