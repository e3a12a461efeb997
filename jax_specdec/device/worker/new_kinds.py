"""Requests that need programs which are not there yet: they wait, and the others go on.

A batch runs with the programs of its kind, or of one that serves more. A request that no compiled
kind would serve together with the batch is held: its admission is carried out once its programs
are there, as if it had come then. They are compiled beside the steps, one kind at a time: for all
requests that are held by then. Where that fails, each is tried by itself, and one whose programs
cannot be compiled ends alone.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax_specdec.control import Admit
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import Kind, PromptKind, as_report
from jax_specdec.device.loop.programs import KeptPrograms
from jax_specdec.device.loop.state import with_report
from jax_specdec.device.worker import background
from jax_specdec.device.worker.background import BackgroundJobs
from jax_specdec.device.worker.prepared import (
    INDEX,
    Compile,
    abstract,
    compile_batch,
    compile_now,
    compile_prompt,
)
from jax_specdec.requests import Request, SamplingParams

if TYPE_CHECKING:
    from jax_specdec.device.worker.worker import Worker

Part = Callable[[Compile], None]  # what has some programs compiled
NUM_SHARED = 5  # programs of all kinds


@dataclass(frozen=True)
class _Job:
    """What is compiled now."""

    kinds: tuple[Kind | PromptKind, ...] = ()
    commands: tuple[Admit, ...] = ()  # that wait for it; none where it only makes steps cheaper


class NewKinds:
    """The requests of a worker that wait for programs.

    Attributes:
      held: their admissions by slot, in the order in which they came.
      unsettled: something has changed that `settle` has to look at.
    """

    def __init__(self, worker: "Worker", compiler: BackgroundJobs) -> None:
        """Begin with none.

        Raises:
          TypeError: the worker cannot drop programs.
        """
        if not isinstance(worker.compiled, KeptPrograms):
            raise TypeError("compiler needs compiled = KeptPrograms(config)")
        self.held: dict[int, Admit] = {}
        self.unsettled = False
        self._worker, self._compiler, self._programs = worker, compiler, worker.compiled
        self._job = _Job()
        self._apart = False  # one request at a time: a compilation for several has failed
        # Kinds that cannot be compiled, and would only make steps cheaper.
        self._refused: set[Kind | PromptKind] = set()
        self._shared = [self._first, self._later]  # programs of all kinds that are to be compiled

    def prepare(
        self,
        asked: Sequence[SamplingParams],
        tell: Callable[[int, int], None] = lambda done, total: None,
        *,
        widths: bool = True,
    ) -> None:
        """Compile what requests will need, before any is there.

        One thread traces, others compile: they leave the interpreter to it.

        Args:
          asked: `WorkerConfig.prepare`.
          tell: called with how many of how many programs are there; the cuts of a message are one.
          widths: `WorkerConfig.prepare_widths`.
        """
        slots = [
            Slot(params=one, most_tokens=1, score_from=None if one.prompt_logprobs is None else 0)
            for one in asked
        ]
        batch, none = self._worker.kind_of(slots), [Slot()] * len(self._worker.slots)
        scoring = self._prompt_kinds(slots)
        narrower = self._narrower(batch) if widths else ()
        kinds: list[Kind | PromptKind] = [batch, *narrower, *scoring]
        parts = [
            *(self._part(kind, none, scoring) for kind in kinds),
            *(shared() for shared in self._shared),
        ]
        total = sum(kind.num_programs for kind in kinds) + NUM_SHARED
        with ThreadPoolExecutor(os.cpu_count(), background.NAME) as pool:
            begun = []
            for part in parts:
                part(lambda *traced: begun.append(pool.submit(compile_now, *traced)))
                tell(sum(one.done() for one in begun), total)
            for one in as_completed(begun):
                one.result()
                tell(sum(other.done() for other in begun), total)
            tell(total, total)
        self._shared.clear()
        for kind in kinds:
            self._programs.be_ready(kind)

    def hold(self, command: Admit) -> None:
        """Take an admission, which `settle` carries out or has its programs compiled."""
        self.held[command.slot] = command
        self.unsettled = True

    def let_go(self, slot: int, generation: int) -> bool:
        """Forget a request that is held; False where there is none."""
        if slot not in self.held or self.held[slot].generation != generation:
            return False
        del self.held[slot]
        return True

    def closest(self, exact: Kind) -> Kind:
        """The cheapest kind that serves the slots, which are of the kind `exact`, as it is there.

        It is `exact` itself where none is: where nothing else runs.
        """
        if self._programs.is_ready(exact):
            return exact
        self.unsettled = True
        slots = self._worker.slots
        serving = [kind for kind in self._programs.ready if kind.serves(exact, slots)]
        return min(serving, key=lambda kind: kind.cost, default=exact)

    def is_ready(self, kind: Kind) -> bool:
        """Whether the programs of a kind are there, which `settle` looks at else."""
        ready = self._programs.is_ready(kind)
        self.unsettled |= not ready and kind not in self._refused
        return ready

    def settle(self) -> None:
        """Admit the requests whose programs are there, and compile what others need."""
        if self._compiler.ended:
            self._end_job(self._compiler.take())
        elif not self.unsettled:
            return
        # Admissions take their time, and so does the beginning of a job: one of both before a step.
        self.unsettled = False
        for command in [*self.held.values()]:
            if self._is_served(command):
                del self.held[command.slot]
                self._worker.place(command)
                self.unsettled = True
        self._apart &= bool(self.held)
        if not self.unsettled and not self._compiler.busy:
            self._start_job()

    def _slots_with(self, commands: Iterable[Admit]) -> list[Slot]:
        slots = [*self._worker.slots]
        for command in commands:
            slots[command.slot] = self._worker.slot_of(command)
        return slots

    def _prompt_kinds(self, slots: Iterable[Slot]) -> dict[PromptKind, Slot]:
        """The kinds of the prompts whose logprobs are wanted, and a slot of each."""
        scoring = [slot for slot in slots if slot.score_from is not None]
        return {self._worker.prompt_kind_of(slot): slot for slot in scoring}

    def _is_served(self, command: Admit) -> bool:
        slots = self._slots_with([command])
        exact = self._worker.kind_of(slots)
        return any(kind.serves(exact, slots) for kind in self._programs.ready) and all(
            map(self._programs.is_ready, self._prompt_kinds([self._worker.slot_of(command)]))
        )

    def _start_job(self) -> None:
        commands = tuple(self.held.values())[: 1 if self._apart else None]
        slots = self._slots_with(commands)
        scoring = self._prompt_kinds(map(self._worker.slot_of, commands))
        needed: tuple[Kind | PromptKind, ...] = (self._worker.kind_of(slots), *scoring)
        kinds = tuple(one for one in needed if not self._programs.is_ready(one))
        if not commands:
            if not (kinds or self._shared):
                kinds = self._narrower(self._worker.kind_of(slots))[:1]
            kinds = tuple(one for one in kinds if self._cheapens(one))
        parts = [self._part(one, slots, scoring) for one in kinds]
        if self._shared and (commands or not parts):
            parts.insert(0, self._shared.pop(0)())
        if parts:
            self._job = _Job(kinds, commands)
            self._compiler.start(lambda: [part(compile_now) for part in parts])

    def _narrower(self, kind: Kind) -> tuple[Kind, ...]:
        """The kinds with fewer drafts whose programs are not there."""
        if self._worker.step_widths is None:
            return ()
        kinds = kind.narrower(self._worker.config.drafter.num_drafts)
        known = self._programs.is_ready
        return tuple(one for one in kinds if not (known(one) or one in self._refused))

    def _cheapens(self, kind: Kind | PromptKind) -> bool:
        """Whether somebody runs whose steps a kind would make cheaper."""
        runs = any(slot.occupied for slot in self._worker.slots)
        return runs and kind not in self._refused

    def _part(
        self, kind: Kind | PromptKind, slots: list[Slot], scoring: Mapping[PromptKind, Slot]
    ) -> Part:
        """What compiles the programs of a kind: for these slots, or the one whose prompt it is."""
        worker, programs = self._worker, self._programs.for_kind(kind)
        drafts = worker.state.drafts
        if isinstance(kind, Kind):
            options = host_slots.all_options(slots, kind.widths, kind.changes)
            report = as_report(kind, None, drafts.token_ids)
            params, state, options = abstract(
                (worker.params, with_report(worker.state, report), options)
            )
            return lambda compile: compile_batch(programs, kind, params, state, options, compile)
        one = host_slots.options_of_slots([host_slots.for_prompt(scoring[kind])], kind.widths)
        params, state, one = abstract((worker.params, with_report(worker.state, None), one))
        return lambda compile: compile_prompt(programs, kind, params, state, one, compile)

    def _end_job(self, error: Exception | None) -> None:
        job, self._job = self._job, _Job()
        if error is None:
            for kind in job.kinds:
                self._programs.be_ready(kind)
            self._worker.options = None  # a closer kind may be there
            return
        why = f"{type(error).__name__}: {error}"
        if len(job.commands) > 1:
            self._apart = True
        elif not job.commands:
            self._refused.update(job.kinds)
            say(f"a program that would make steps cheaper cannot be compiled: {why}")
        elif self.let_go(job.commands[0].slot, job.commands[0].generation):
            command = job.commands[0]
            self._worker.end(command)
            say(f"request {command.request.id!r} ends: its programs cannot be compiled: {why}")

    def _first(self) -> Part:
        """What compiles the programs that every request needs."""
        worker, chunk = self._worker, self._worker.prefill_chunk
        programs = self._programs
        params, state = abstract((worker.params, with_report(worker.state, None)))
        request = Request(id="", prompt_token_ids=(0,))
        drafts = worker.config.drafter.num_drafts
        admission = host_slots.admission(request, worker.config.max_length, drafts)

        def job(compile: Compile) -> None:
            compile(programs.prefill_chunk.trace(params, state, INDEX, INDEX, chunk=chunk))
            compile(programs.admit.trace(state, INDEX, admission))

        return job

    def _later(self) -> Part:
        """What compiles programs that some requests need later."""
        programs = self._programs
        state = abstract(with_report(self._worker.state, None))

        def job(compile: Compile) -> None:
            compile(programs.release.trace(state, INDEX))
            compile(programs.copy_prefix.trace(state, INDEX, INDEX))
            compile(programs.start_again.trace(state))

        return job


def say(text: str) -> None:
    """Write to the worker's output, which the engine keeps in a file."""
    print(text, file=sys.stderr, flush=True)
