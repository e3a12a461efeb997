"""The programs of a ladder, compiled before a worker is ready.

What they are called with is said by shapes, types and places: nothing of it is read, so they are
compiled while the weights are read.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.stages import Compiled as Stage
from jax.stages import Traced

from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import Slot
from jax_specdec.device.loop.kinds import PromptKind, StepKind, empty_report
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopState, with_report
from jax_specdec.device.messages.pack import Stamp
from jax_specdec.device.worker.grammars import no_masks
from jax_specdec.device.worker.kept_kinds import (
    Anew,
    AnyKind,
    KeptKinds,
    compiled_anew,
    not_kept_twice,
)
from jax_specdec.device.worker.outgoing import copied_lengths
from jax_specdec.requests import Request

Tree = TypeVar("Tree")  # of arrays, or of their shapes and places

Compile = Callable[[str, Traced], None]  # takes a program and its name; compiles it, now or soon

_INDEX = np.int32(0)
STAMP = Stamp(np.zeros(2, np.uint32), *np.zeros(3, np.uint32))


CompileTask = Callable[[Compile], None]  # what has some programs compiled
Ahead = dict[AnyKind, dict[str, Stage]]  # programs by kind and name


class Arguments(NamedTuple):
    """Abstract arguments of a loop's programs."""

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


def compile_ladder(
    programs: Compiled,
    kinds: Sequence[StepKind | PromptKind],
    arguments: Arguments,
    prefill_chunk: int,
    tell: Callable[[int, int, str], object] = lambda done, total, name: None,
    kept: KeptKinds | None = None,
) -> Ahead:
    """Compile what every request needs, and what batches and prompts of some kinds do.

    One thread traces and lowers, which the interpreter does; others compile, or read what was kept,
    and leave the interpreter to it.

    Args:
      programs: of the loop.
      kinds: of batches, and of prompts with logprobs.
      arguments: of all programs.
      prefill_chunk: positions of a chunk of other prompts.
      tell: called with how many of how many kinds are there, and the name of another one.
      kept: where programs are kept that need not be traced; None: nowhere.

    Returns:
      The programs of each kind, by name.

    Raises:
      CannotCompile: names the kind.
    """
    parts: list[tuple[AnyKind, str, CompileTask]] = [
        (None, "prompts", partial(compile_shared, programs, arguments, prefill_chunk)),
        *(
            (kind, str(kind), partial(compile_kind, programs, kind, arguments))
            for kind in dict.fromkeys(kinds)
        ),
    ]
    jobs: list[tuple[AnyKind, str, dict[str, Future[Anew]]]] = []
    begun: dict[int, tuple[Any, Future[Anew]]] = {}  # what was traced: kinds share programs

    def begin(name: str, traced: Traced) -> None:
        key = id(traced.jaxpr)
        if key not in begun:
            begun[key] = traced.jaxpr, pool.submit(compiled_anew, traced.lower())
        jobs[-1][2][name] = begun[key][1]

    def say(name: str, traced: int) -> None:
        done = sum(all(job.done() for job in waiting.values()) for *_, waiting in jobs[:traced])
        tell(len(ahead) + done, len(parts), name)

    ahead: Ahead = {}
    writing = contextlib.nullcontext() if kept is None else not_kept_twice()
    with writing, ThreadPoolExecutor(os.cpu_count(), "compiling") as pool:
        name = ""
        try:
            if kept is not None:
                reading = {
                    kind: pool.submit(kept.load, kind) for kind, *_ in parts if kept.has(kind)
                }
                for kind, stages in reading.items():
                    if (of_kind := stages.result()) is not None:
                        ahead[kind] = of_kind
                        say(str(kind or "prompts"), 0)
            for kind, name, part in parts:
                if kind not in ahead:
                    jobs.append((kind, name, {}))
                    say(name, len(jobs) - 1)
                    part(begin)
            for _, name, waiting in jobs:
                say(name, len(jobs))
                for job in waiting.values():
                    job.result()
        except Exception as error:
            pool.shutdown(wait=False, cancel_futures=True)
            why = f"{type(error).__name__}: {error}"
            raise CannotCompile(f"{name}: this program cannot be compiled: {why}") from error
        compiled = {
            kind: {name: job.result() for name, job in waiting.items()} for kind, _, waiting in jobs
        }
        if kept is not None:
            list(pool.map(kept.save, compiled, compiled.values()))
    tell(len(parts), len(parts), name)
    for kind, new in compiled.items():
        ahead[kind] = {name: program.stage for name, program in new.items()}
    return ahead


def compile_one(
    programs: Compiled,
    kind: StepKind | PromptKind,
    arguments: Arguments,
    kept: KeptKinds | None,
    begun: dict[int, tuple[Any, Anew]],
) -> dict[str, Stage]:
    """Compile the programs of a kind in this thread, or read them.

    Args:
      programs, kind, arguments, kept: as above.
      begun: programs of other kinds, which this one may share; it takes in those of this kind.
    """
    if kept is not None and (stages := kept.load(kind)) is not None:
        return stages
    compiled: dict[str, Anew] = {}

    def compile_now(name: str, traced: Traced) -> None:
        key = id(traced.jaxpr)
        if key not in begun:
            begun[key] = traced.jaxpr, compiled_anew(traced.lower())
        compiled[name] = begun[key][1]

    with contextlib.nullcontext() if kept is None else not_kept_twice():
        compile_kind(programs, kind, arguments, compile_now)
    if kept is not None:
        kept.save(kind, compiled)
    return {name: program.stage for name, program in compiled.items()}


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
    prefill = programs.prefill_chunk.trace(params, state, _INDEX, _INDEX, chunk=prefill_chunk)
    compile("prefill_chunk", prefill)
    compile("admit", programs.admit.trace(state, _INDEX, host_slots.admission(request, *sizes)))
    compile("release", programs.release.trace(state, _INDEX))
    compile("copy_prefix", programs.copy_prefix.trace(state, _INDEX, _INDEX))
    compile("start_again", programs.start_again.trace(state))


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
        _compiled("seen", programs.seen.trace(bare), bare, compile)
        forward = programs.forward_rows.trace(params, bare)
        run, rows = _compiled("forward_rows", forward, (params, bare), compile)
        run = run._replace(drafts=run.drafts._replace(report=report))
        assert changes is not None
        changes = changes._replace(grammar=no_masks(programs.config))
        name, traced = (
            "choose",
            programs.choose.trace(params, run, rows, options, changes=changes, **kind.step_options),
        )
    else:
        traced = programs.step.trace(params, state, options, changes=changes, **kind.step_options)
        name = "step"
    output = _compiled(name, traced, (params, state), compile)[1]
    message_inputs, widths = (output, options, STAMP), kind.widths
    target = programs.target_message.trace(*message_inputs, np.bool_(False), widths=widths)
    messages = {"target_message": target}
    if kind.reports_drafts:
        messages["draft_message"] = programs.draft_message.trace(*message_inputs, widths=widths)
    _compile_copies(
        programs,
        [_compiled(name, message, output, compile) for name, message in messages.items()],
        compile,
    )


def compile_prompt(
    programs: Compiled, kind: PromptKind, arguments: Arguments, compile: Compile
) -> None:
    """Compile the chunks of a prompt with logprobs, and their message; arguments as above."""
    num_slots = programs.config.num_slots
    options = abstract(host_slots.options_of_slots([Slot()], kind.widths))
    ids = np.zeros((kind.chunk, kind.widths.chosen), np.int32)
    traced = programs.score_chunk.trace(
        *arguments, _INDEX, _INDEX, _INDEX, ids, options, chunk=kind.chunk, widths=kind.widths
    )
    scored = _compiled("score_chunk", traced, arguments, compile)[1]
    message = programs.prompt_message.trace(
        scored,
        _INDEX,
        options,
        np.zeros(num_slots, np.uint32),
        STAMP,
        vocab_size=programs.config.model.vocab_size,
        widths=kind.widths,
    )
    _compile_copies(programs, [_compiled("prompt_message", message, scored, compile)], compile)


def _compile_copies(programs: Compiled, messages: Sequence[jax.Array], compile: Compile) -> None:
    if programs.cuts:
        for words in messages:
            for count in copied_lengths(programs, words.size):
                compile(f"leading {words.size} {count}", programs.leading.trace(words, count))


def _compiled(name: str, traced: Traced, arguments: object, compile: Compile) -> Any:
    """Compile a program; what it returns, abstract."""
    leaves = jax.tree.leaves(arguments)
    # Otherwise what it returns may be moved, too, and nothing has to be compiled to know it.
    if not any(getattr(x, "sharding", None) is not None for x in leaves):
        compile(name, traced)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)

    def shape_of(x: jax.Array, place: jax.sharding.Sharding) -> object:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    places = traced.lower().compile().output_shardings
    return jax.tree.map(shape_of, traced.out_info, places)
