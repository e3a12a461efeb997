"""The programs of a ladder, compiled before a worker is ready.

What they are called with is said by shapes, types and places: nothing of it is read, so they are
compiled while the weights are read.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.stages import Lowered, Traced

from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import PromptKind, StepKind, empty_report
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopState, with_report
from jax_specdec.device.messages.pack import Stamp
from jax_specdec.device.worker.grammars import no_masks
from jax_specdec.device.worker.outgoing import copied_lengths
from jax_specdec.requests import Request

Tree = TypeVar("Tree")  # of arrays, or of their shapes and places

Compile = Callable[..., None]  # takes traced programs; compiles them, now or soon

INDEX = np.int32(0)
STAMP = Stamp(np.zeros(2, np.uint32), *np.zeros(3, np.uint32))


CompileTask = Callable[[Compile], None]  # what has some programs compiled


class Arguments(NamedTuple):
    """What the programs of a loop are called with, abstract."""

    params: Any
    state: LoopState

    @classmethod
    def of(cls, params: Any, state: LoopState) -> "Arguments":
        """The shapes, types and places of these."""
        return cls(*abstract((params, with_report(state, None))))


class CannotCompile(RuntimeError):
    """A program that the device cannot run: which one, and why."""


def abstract(tree: Tree) -> Tree:
    """Shapes, types and places in place of arrays on devices."""

    def shape_of(x: object) -> object:
        if not isinstance(x, jax.Array):
            return x
        place = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=x.weak_type)

    shapes: Tree = jax.tree.map(shape_of, tree)
    return shapes


def compile_now(*lowered: Lowered) -> None:
    """Compile programs one after the other."""
    for program in lowered:
        program.compile()


def compile_traced(*traced: Traced) -> None:
    """Lower and compile programs one after the other."""
    for program in traced:
        program.lower().compile()


def compile_ladder(
    programs: Compiled,
    kinds: Sequence[StepKind | PromptKind],
    arguments: Arguments,
    prefill_chunk: int,
    tell: Callable[[int, int, str], object] = lambda done, total, name: None,
) -> None:
    """Compile what every request needs, and what batches and prompts of some kinds do.

    One thread traces and lowers, which the interpreter does; others compile, or read what was kept,
    and leave the interpreter to it.

    Args:
      programs: of the loop.
      kinds: of batches, and of prompts with logprobs.
      arguments: of all programs.
      prefill_chunk: positions of a chunk of other prompts.
      tell: called with how many of how many kinds are there, and the name of another one.

    Raises:
      CannotCompile: names the kind.
    """
    parts: list[tuple[str, CompileTask]] = [
        ("prompts", partial(compile_shared, programs, arguments, prefill_chunk)),
        *((str(kind), partial(compile_kind, programs, kind, arguments)) for kind in kinds),
    ]
    jobs: list[tuple[str, list[Future[None]]]] = []
    begun: dict[int, Any] = {}  # what was traced: kinds share programs

    def begin(*traced: Traced) -> None:
        new = [program for program in traced if id(program.jaxpr) not in begun]
        begun.update((id(program.jaxpr), program.jaxpr) for program in new)
        jobs[-1][1].append(pool.submit(compile_now, *(program.lower() for program in new)))

    def say(name: str, traced: int) -> None:
        done = sum(all(job.done() for job in waiting) for _, waiting in jobs[:traced])
        tell(done, len(parts), name)

    with ThreadPoolExecutor(os.cpu_count(), "compiling") as pool:
        name = ""
        try:
            for traced, (name, part) in enumerate(parts):
                jobs.append((name, []))
                say(name, traced)
                part(begin)
            for name, waiting in jobs:
                say(name, len(parts))
                for job in waiting:
                    job.result()
        except Exception as error:
            pool.shutdown(wait=False, cancel_futures=True)
            why = f"{type(error).__name__}: {error}"
            raise CannotCompile(f"{name}: this program cannot be compiled: {why}") from error
    tell(len(parts), len(parts), name)


def compile_kind(
    programs: Compiled, kind: StepKind | PromptKind, arguments: Arguments, compile: Compile
) -> None:
    """Compile what batches or prompts of a kind need beside what every request does."""
    of_kind: Callable[..., None] = compile_prompt if isinstance(kind, PromptKind) else compile_batch
    of_kind(programs, kind, arguments, compile)


def compile_shared(
    programs: Compiled, arguments: Arguments, prefill_chunk: int, compile: Compile
) -> None:
    """Compile the programs of all kinds."""
    params, state = arguments
    request = Request(id="", prompt_token_ids=(0,))
    sizes = programs.config.max_length, programs.config.drafter.num_drafts
    compile(programs.prefill_chunk.trace(params, state, INDEX, INDEX, chunk=prefill_chunk))
    compile(programs.admit.trace(state, INDEX, host_slots.admission(request, *sizes)))
    compile(programs.release.trace(state, INDEX))
    compile(programs.copy_prefix.trace(state, INDEX, INDEX))
    compile(programs.start_again.trace(state))


def compile_batch(
    programs: Compiled, kind: StepKind, arguments: Arguments, compile: Compile
) -> None:
    """Compile the step and the messages of a kind.

    Args:
      programs: of the loop.
      kind: what for.
      arguments: of all programs.
      compile: gets the programs, the longest first.
    """
    params, bare = arguments
    slots = [Slot()] * programs.config.num_slots
    options, changes = abstract(host_slots.all_options(slots, kind.widths, kind.changes))
    drafts = bare.drafts.token_ids
    report = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=drafts.sharding),
        empty_report(kind, drafts.shape),
    )
    state = bare._replace(drafts=bare.drafts._replace(report=report))
    if kind.has_grammar:
        _compiled(programs.seen.trace(bare), bare, compile)
        run, rows = _compiled(programs.forward_rows.trace(params, bare), (params, bare), compile)
        run = run._replace(drafts=run.drafts._replace(report=report))
        assert changes is not None
        changes = changes._replace(grammar=no_masks(programs.config))
        traced = programs.choose.trace(
            params, run, rows, options, changes=changes, **kind.step_options
        )
    else:
        traced = programs.step.trace(params, state, options, changes=changes, **kind.step_options)
    output = _compiled(traced, (params, state), compile)[1]
    message_inputs, widths = (output, options, STAMP), kind.widths
    messages = [programs.target_message.trace(*message_inputs, np.bool_(False), widths=widths)]
    if kind.reports_drafts:
        messages.append(programs.draft_message.trace(*message_inputs, widths=widths))
    _compile_copies(
        programs, [_compiled(message, output, compile) for message in messages], compile
    )


def compile_prompt(
    programs: Compiled, kind: PromptKind, arguments: Arguments, compile: Compile
) -> None:
    """Compile the chunks of a prompt with logprobs, and their message; arguments as above."""
    num_slots = programs.config.num_slots
    options = abstract(host_slots.options_of_slots([Slot()], kind.widths))
    ids = np.zeros((kind.chunk, kind.widths.chosen), np.int32)
    traced = programs.score_chunk.trace(
        *arguments, INDEX, INDEX, INDEX, ids, options, chunk=kind.chunk, widths=kind.widths
    )
    scored = _compiled(traced, arguments, compile)[1]
    message = programs.prompt_message.trace(
        scored,
        INDEX,
        options,
        np.zeros(num_slots, np.uint32),
        STAMP,
        vocab_size=programs.config.model.vocab_size,
        widths=kind.widths,
    )
    _compile_copies(programs, [_compiled(message, scored, compile)], compile)


def _compile_copies(programs: Compiled, messages: Sequence[jax.Array], compile: Compile) -> None:
    if programs.cuts:
        compile(
            *(
                programs.leading.trace(words, count)
                for words in messages
                for count in copied_lengths(programs, words.size)
            )
        )


def _compiled(traced: Traced, arguments: object, compile: Compile) -> Any:
    """Compile a program; what it returns, abstract."""
    leaves = jax.tree.leaves(arguments)
    # Otherwise what it returns may be moved, too, and nothing has to be compiled to know it.
    if not any(getattr(x, "sharding", None) is not None for x in leaves):
        compile(traced)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)

    def shape_of(x: jax.Array, place: jax.sharding.Sharding) -> object:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    places = traced.lower().compile().output_shardings
    return jax.tree.map(shape_of, traced.out_info, places)
