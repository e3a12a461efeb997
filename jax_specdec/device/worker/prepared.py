"""The programs of a kind, compiled before a batch of that kind runs.

What they are called with is said by shapes, types and places: nothing of it is read, so another
thread may compile while the state goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.stages import Traced

from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import AllOptions, Slot
from jax_specdec.device.loop.kinds import Kind, PromptKind
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopState
from jax_specdec.device.messages.batch_options import BatchOptions, words_bucket
from jax_specdec.device.messages.pack import Stamp
from jax_specdec.device.worker.grammars import no_masks

Tree = TypeVar("Tree")  # of arrays, or of their shapes and places

Compile = Callable[..., None]  # takes traced programs; compiles them, now or soon

INDEX = np.int32(0)
STAMP = Stamp(np.zeros(2, np.uint32), *np.zeros(3, np.uint32))


def abstract(tree: Tree) -> Tree:
    """Shapes, types and places in place of arrays on devices."""

    def shape_of(x: object) -> object:
        if not isinstance(x, jax.Array):
            return x
        place = x.sharding if x.committed else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place, weak_type=x.weak_type)  # type: ignore[no-untyped-call]

    found: Tree = jax.tree.map(shape_of, tree)
    return found


def compile_now(*traced: Traced) -> None:
    """Compile programs one after the other."""
    for one in traced:
        one.lower().compile()


def compile_batch(
    programs: Compiled,
    kind: Kind,
    params: Any,
    state: LoopState,
    options: AllOptions,
    compile: Compile = compile_now,
) -> None:
    """Compile the step and the messages of a kind.

    Args:
      programs: of the kind.
      kind: what for.
      params: abstract, as the others.
      state: with the report on drafts in the widths of the kind.
      options: by slots of the kind.
      compile: gets the programs, the longest first.
    """
    if kind.has_grammar:
        bare = _with_report(state, None)
        _compiled(programs.seen.trace(bare), bare, compile)
        run, rows = _compiled(programs.forward_rows.trace(params, bare), (params, bare), compile)
        run = _with_report(run, state.drafts.report)
        assert options.changes is not None
        changes = options.changes._replace(grammar=no_masks(programs.config))
        traced = programs.choose.trace(
            params, run, rows, options.options, changes=changes, **kind.step_options
        )
    else:
        traced = programs.step.trace(
            params, state, options.options, changes=options.changes, **kind.step_options
        )
    output = _compiled(traced, (params, state), compile)[1]
    said, widths = (output, options.options, STAMP), kind.widths
    messages = [programs.target_message.trace(*said, np.bool_(False), widths=widths)]
    if kind.reports_drafts:
        messages.append(programs.draft_message.trace(*said, widths=widths))
    _compile_cuts(programs, [_compiled(one, output, compile) for one in messages], compile)


def _with_report(state: Any, report: Any) -> Any:
    """`state.with_report` of an abstract state, which has shapes in place of arrays."""
    return state._replace(drafts=state.drafts._replace(report=report))


def compile_prompt(
    programs: Compiled,
    kind: PromptKind,
    params: Any,
    state: LoopState,
    options: BatchOptions,
    compile: Compile = compile_now,
) -> None:
    """Compile the chunks of a prompt with logprobs, and their message; arguments as above."""
    num_slots = programs.config.num_slots
    traced = programs.score_chunk.trace(
        params, state, INDEX, INDEX, options, chunk=kind.chunk, widths=kind.widths
    )
    scored = _compiled(traced, (params, state), compile)[1]
    message = programs.prompt_message.trace(
        scored,
        INDEX,
        options,
        np.zeros(num_slots, np.uint32),
        STAMP,
        vocab_size=programs.config.model.vocab_size,
        widths=kind.widths,
    )
    _compile_cuts(programs, [_compiled(message, scored, compile)], compile)


def _compile_cuts(programs: Compiled, messages: Sequence[jax.Array], compile: Compile) -> None:
    compile(
        *(
            programs.leading.trace(words, count)
            for words in messages
            for count in _cuts(programs.config.num_slots, words.size)
        )
    )


def _cuts(num_slots: int, size: int) -> Iterator[int]:
    """The lengths that messages of at most `size` words are copied with."""
    words = host_slots.target_bound([Slot()] * num_slots)
    while (cut := words_bucket(words)) < size:
        yield cut
        words = cut + 1
    yield size


def _compiled(traced: Traced, arguments: object, compile: Compile) -> Any:
    """Compile a program; what it returns, abstract."""
    leaves = jax.tree.leaves(arguments)
    # Otherwise what it returns may be moved, too, and nothing has to be compiled to know it.
    if not any(getattr(x, "sharding", None) is not None for x in leaves):
        compile(traced)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)  # type: ignore[no-untyped-call]

    def shape_of(x: jax.Array, place: jax.sharding.Sharding) -> object:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # type: ignore[no-untyped-call]

    places = traced.lower().compile().output_shardings
    return jax.tree.map(shape_of, traced.out_info, places)
