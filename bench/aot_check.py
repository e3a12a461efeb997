"""Compile what `jax-specdec check-device` compiles, for a GPU without one: how long that takes.

`python -m bench.aot check --chip H200` runs the pieces of the check that a GPU would run, in their
order. Their programs are traced, lowered and compiled, and not executed: zeros stand for arrays and
results, and nothing is compared. A line says of each piece how many programs it has, and the
processor time that they took, of child processes too.

The limits, in seconds: `PIECE` for a piece, which the check kills as hanging after 150; `TOTAL` for
all without `--full`, so that a minute of the check's nine is left to run them. What autotuning and
other libraries take is not in them. And each contender of the times must compile.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from pallas_kernels.testing import checks, chips, compile_target, draws, oracle, pieces, times
from pallas_kernels.testing.shapes import Shape

BACKEND = "mosaic_gpu"
PIECE, TOTAL = 100.0, 480.0
STEPS = ("correctness", "times")
OPTIONS: dict[str, dict[str, Any]] = {
    "--chip": {"choices": tuple(chips.GPUS), "default": "H200"},
    "--full": {"action": "store_true", "help": "the pieces of check-device --full"},
    "--only": {"default": "", "metavar": "WORD", "help": "the pieces whose names have it"},
}


class Taken(NamedTuple):
    """What the programs of a piece took."""

    piece: str
    programs: int
    seconds: float  # of processor time
    wall: float  # seconds in which they were made
    absent: dict[str, str]  # contenders that cannot be compiled, and why

    @property
    def step(self) -> str:
        """Of the check."""
        return "times" if self.piece.startswith(f"{pieces.TIMES}:") else "correctness"


class Compiler:
    """Compiles in place of `jax.jit`.

    Attributes:
      sharding: of the device that is compiled for.
      platform: its name, to jax.
      seconds: a number for each program so far.
    """

    def __init__(self, sharding: Any, platform: str = "cuda") -> None:
        """Nothing is compiled yet."""
        self.sharding, self.platform = sharding, platform
        self.seconds: list[float] = []
        self._made: set[Shape] = set()

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that compiles for the shapes of its arguments, and returns zeros."""
        jitted, results = jax.jit(function), dict[Any, Any]()

        def call(*arguments: Any) -> Any:
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
                return jitted(*arguments)  # it is traced into another program
            shapes = jax.tree.map(self._shape_of, arguments)
            key = str(shapes)
            if key not in results:
                begin = processor_time()
                traced = jitted.trace(*shapes)
                traced.lower(lowering_platforms=(self.platform,)).compile()
                self.seconds.append(processor_time() - begin)
                results[key] = traced.out_info
            return jax.tree.map(lambda x: zeros(x.shape, x.dtype), results[key])

        return call

    def timed(
        self, call: times.TimedCall, buffers: times.Buffers, _: bool
    ) -> tuple[Any, list[float]]:
        """In place of `times.timed`: a second, which says nothing."""
        program = self.jit(times.in_one_program(call, buffers, times.turns_of(buffers)))
        return program(buffers.ids, *buffers.programs[0])[0], [1.0]

    def _shape_of(self, x: Any) -> Any:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=self.sharding)

    def random_logits(self, shape: Shape, seed: int) -> Any:
        """Zeros in place of `checks.random_logits`, whose program is compiled once a shape."""
        if shape not in self._made:
            self._made.add(shape)
            self.jit(lambda key: checks.case_logits(key, shape))(jax.random.key(seed))
        return zeros((shape.rows, shape.vocabulary), shape.dtype)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of NumPy that takes no memory, and is read only."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def processor_time() -> float:
    """Seconds of this process and those that it waited for: ptxas is one of its own."""
    return sum(os.times()[:4])


@contextmanager
def compiled_only(compiler: Compiler) -> Iterator[None]:
    """Pieces compile, and neither run nor compare."""
    silent = mock.Mock()
    stand_ins: tuple[tuple[Any, str, Any], ...] = (
        (checks, "jax", SimpleNamespace(**vars(jax) | {"jit": compiler.jit})),
        (checks, "random_logits", compiler.random_logits),
        (times, "timed", compiler.timed),
        (np.testing, "assert_array_equal", silent),
        (np.testing, "assert_allclose", silent),
        (oracle, "assert_matches", silent),
        (draws, "check_drawn", silent),
    )
    with ExitStack() as stack:
        for module, name, stand_in in stand_ins:
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def measure(piece: pieces.Piece, compiler: Compiler) -> Taken:
    """Compile the programs of a piece."""
    before, begin = len(compiler.seconds), time.monotonic()
    with compiled_only(compiler):
        figures = piece.run() or {}
    seconds = compiler.seconds[before:]
    took = time.monotonic() - begin
    return Taken(piece.name, len(seconds), sum(seconds), took, figures.get("absent", {}))


def broken(options: argparse.Namespace) -> int:
    """Compile every piece; returns how many limits are broken."""
    compiler = Compiler(compile_target.find(options.chip).sharding)
    kernels = checks.by_name(BACKEND)  # type: ignore[arg-type]
    taken: list[Taken] = []
    for part in pieces.parts_of(BACKEND):
        if part == pieces.PEERS:
            continue
        for piece in pieces.pieces_of(part, kernels, BACKEND, full=options.full, rehearse=False):
            if options.only not in piece.name:
                continue
            taken.append(x := measure(piece, compiler))
            said = f"{x.seconds:6.1f} s ({x.wall:.1f} s passed), {x.programs} programs"
            print(f"{said}  {x.piece}", *x.absent.items(), sep="  ", flush=True)
    for step in STEPS:
        of_step = [x for x in taken if x.step == step]
        print(f"{step}: {sum(x.seconds for x in of_step):.0f} s, {len(of_step)} pieces")
    texts = broken_limits(taken, full=options.full)
    for text in texts:
        print(f"BROKEN {text}")
    return len(texts)


def broken_limits(taken: list[Taken], *, full: bool) -> list[str]:
    """A sentence for each limit that is broken."""
    out = [f"{x.piece}: {x.seconds:.1f} s > {PIECE:.0f}" for x in taken if x.seconds > PIECE]
    out += [f"{x.piece}: {who}: {why}" for x in taken for who, why in x.absent.items()]
    total = sum(x.seconds for x in taken)
    if total > TOTAL and not full:
        out.append(f"all pieces: {total:.0f} s > {TOTAL:.0f}")
    return out
