"""CTAs of one launch, executed: all their threads in step, one NumPy lane each, until they diverge.

Threads that diverge run apart, those that are furthest behind in the program first, and join where
they meet. A barrier lets a CTA on when all its threads wait at it; threads that leave before, or
wait at another one, are an error. Warp instructions wait for the lanes that their mask names.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from . import instructions
from .parser import Instruction, Program, PtxError, Register, Symbol
from .threads import Hardware, Launch, Threads
from .warps import MissingLane


class Counts(NamedTuple):
    """Counts of a run."""

    instructions: int  # issued, for all threads at once; summed over its batches
    barriers: int  # passed by the CTA that passed most


class Machine:
    """A launch; global memory outlives it."""

    def __init__(self, program: Program, launch: Launch, hardware: Hardware) -> None:
        self.program = program
        self.threads = Threads(program, launch, hardware)
        self.steps = [instructions.bind(self.threads, x) for x in program.instructions]
        self.guards = {
            x: self.threads.source(Register(x), "p", "a branch or a guard")
            for x in {x.guard for x in program.instructions if x.guard}
        }

    def run(self, ctas: Sequence[int]) -> Counts:
        """These CTAs, together."""
        self.threads.start(ctas)
        self.instructions = 0
        # Threads that can run, by program counter; those at barriers, alike.
        self.groups: dict[int, np.ndarray] = {0: self.threads.everyone}
        self.waiting: dict[int, np.ndarray] = {}
        self.at_cluster: dict[int, np.ndarray] = {}  # those at barriers of their cluster
        with np.errstate(all="ignore"):
            self._run()
        return Counts(self.instructions, int(self.threads.epochs.max()))

    def _run(self) -> None:
        """`late`: where a warp instruction waits for lanes that are elsewhere, and what is wrong
        if none of them come.
        """
        groups, code = self.groups, self.program.instructions
        late: dict[int, tuple[np.ndarray, MissingLane]] = {}
        while groups:
            stuck = [x for x, (mask, _) in late.items() if np.array_equal(groups.get(x), mask)]
            pc = min(groups.keys() - set(stuck), default=None)
            if pc is None:
                raise late[min(stuck)][1]
            mask = groups.pop(pc)
            self.threads.mask = None if mask.all() else mask
            try:  # straight on to the next branch, barrier or place where others are
                while pc not in groups and pc < len(code) and self.steps[pc] is not None:
                    self._step(pc)
                    pc += 1
            except MissingLane as error:
                late[pc] = mask, error
                self._go(pc, mask)
                continue
            if pc == len(code):
                raise PtxError("threads run past the end of the program")
            if pc in groups:
                self._go(pc, mask)
                continue
            self.instructions += 1
            self._control(code[pc], pc, mask)
            self._pass_cluster_barrier()
        if self.waiting or self.at_cluster:
            where = code[min([*self.waiting, *self.at_cluster])]
            raise where.error("threads wait for others that left, or wait elsewhere")

    def _go(self, to: int, who: np.ndarray) -> None:
        if who.any():
            self.groups[to] = self.groups.get(to, False) | who

    def _step(self, pc: int) -> None:
        threads = self.threads
        self.instructions += 1
        if self.instructions > threads.hardware.max_instructions:
            raise PtxError(f"more than {threads.hardware.max_instructions} instructions")
        instruction = self.program.instructions[pc]
        mask = threads.mask
        try:
            if instruction.guard is not None:
                threads.mask = self._guarded(instruction)
            if threads.mask is None or threads.mask.any():
                self.steps[pc]()
        except PtxError as error:
            raise type(error)(*instruction.error(str(error)).args) from None
        finally:
            threads.mask = mask

    def _guarded(self, instruction: Instruction) -> np.ndarray:
        """The running threads whose guard holds."""
        chosen, _ = self.guards[instruction.guard]()
        return (chosen ^ instruction.negated) & self.threads.active()

    def _control(self, instruction: Instruction, pc: int, mask: np.ndarray) -> None:
        """A branch, an end or a barrier of the threads in `mask`."""
        threads, opcode = self.threads, instruction.opcode
        taken = mask if instruction.guard is None else self._guarded(instruction)
        if opcode in instructions.WAIT:
            self.at_cluster[pc] = self.at_cluster.get(pc, False) | mask
            return
        if opcode in instructions.ARRIVE:
            if (threads.arrived & mask).any():
                raise instruction.error("a second arrival without a wait")
            threads.arrived = threads.arrived | mask
            threads.releases = np.where(mask, "release" in opcode, threads.releases)
            self._go(pc + 1, mask)
            return
        if opcode != "bar.sync":
            self._go(pc + 1, mask & ~taken)
            if opcode == "ret":
                threads.ended = threads.ended | taken
                return
            (target,) = instruction.operands
            if opcode == "bra.uni" and (taken != mask).any():
                raise instruction.error("not all threads take a uniform branch")
            assert isinstance(target, Symbol)
            if target.name not in self.program.labels:
                raise instruction.error("there is no such label")
            self._go(self.program.labels[target.name], taken)
            return
        if instruction.guard is not None:
            raise instruction.error("a barrier with a guard")
        self._check_barrier(instruction)
        waits = self.waiting.pop(pc, False) | mask
        complete = waits.reshape(-1, self.program.threads).all(axis=1)
        threads.pass_barrier(complete)
        released = complete[threads.local_cta]
        self._go(pc + 1, waits & released)
        if (waits & ~released).any():
            self.waiting[pc] = waits & ~released

    def _pass_cluster_barrier(self) -> None:
        """Let those on that wait for a cluster which has arrived."""
        if not self.at_cluster:
            return
        passed = self.threads.pass_cluster_barrier()
        for pc, waits in list(self.at_cluster.items()):
            self._go(pc + 1, waits & passed)
            self.at_cluster[pc] = waits & ~passed
            if passed[waits].all():
                del self.at_cluster[pc]

    def _check_barrier(self, instruction: Instruction) -> None:
        """bar.sync a{, b}: barrier a from 0 to 15, for b threads; here always the whole CTA."""
        threads = self.threads
        here = threads.active()
        values = [
            np.unique(np.broadcast_to(threads.source(x, "w")()[0], here.shape)[here])
            for x in instruction.operands
        ]
        if len(values) == 2 and (values[1] != self.program.threads).any():
            raise instruction.error(f"a barrier of fewer threads than {self.program.threads}")
        if len(values) not in (1, 2) or values[0].size != 1 or values[0][0] > 15:
            raise instruction.error("not the same barrier, from 0 to 15, for all threads")


def run(
    program: Program, launch: Launch, batches: Sequence[Sequence[int]], hardware: Hardware
) -> Counts:
    """Run all CTAs of a launch: batch after batch, the CTAs of a batch in step."""
    machine = Machine(program, launch, hardware)
    instructions, barriers = zip(*map(machine.run, batches), strict=True)
    return Counts(sum(instructions), max(barriers))
