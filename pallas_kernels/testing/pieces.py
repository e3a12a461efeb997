"""The pieces of a check of a device: each kernel's correctness at real shapes, times, and peers.

    python -m pallas_kernels.testing.pieces BACKEND NAME ... [--rehearse]

runs pieces by name, in this order, in one process, and writes a line of JSON when one begins and
when it ends: `jax-specdec check-device` reads them, and ends a process in which a piece hangs. What
is no wrong answer but an error may have broken the device's context: the process ends behind it.
"""

import argparse
import functools
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pallas_kernels.testing import checks
from pallas_kernels.testing.checks import Kernels
from pallas_kernels.testing.shapes import VOCABULARIES, Shape

BF16, F16, F32 = "bfloat16", "float16", "float32"


class Piece(NamedTuple):
    """One piece: `run` checks, or returns figures by name."""

    name: str
    run: Callable[[], Any]


class CheckedKernel(NamedTuple):
    """Checks of one kernel: the most informative shapes first."""

    kernel: str
    check: Callable[[Kernels, Shape], None]
    shapes: tuple[Shape, ...]
    more: tuple[Shape, ...]  # with `--full`
    rehearsed: Shape
    backends: tuple[str, ...] = ("mosaic_gpu", "mosaic_tpu")
    rehearsed_check: Callable[[Kernels, Shape], None] | None = None  # None: the same


CHECK_PARTS = {
    "rows": CheckedKernel(
        "top K of given tokens' rows",
        checks.check_rows,
        (
            Shape(64, 131_072, 20, BF16),
            Shape(64, 151_936, 0, F32),
            Shape(4, 50_257, 128, F16),
            Shape(1536, 32_000, 20, BF16),  # a row's programs on a GPU: a cluster of 4
            Shape(1536, 151_936, 5, BF16),
            Shape(133, 65_024, 64, F32),  # of 5, and a row more than multiprocessors
            Shape(1, 262_144, 1, BF16),
            Shape(256, 100_352, 33, F16),  # of 7
            Shape(96, 32_000, 5, F32),  # of 6
            Shape(512, 32_768, 20, BF16),  # of 2
        ),
        tuple(
            Shape(rows, vocabulary, k, dtype)
            for (rows, k), vocabulary, dtype in itertools.product(
                ((1, 128), (4, 20), (64, 0), (256, 5), (64, 512)),
                VOCABULARIES.values(),
                (BF16, F16, F32),
            )
        ),
        Shape(2, 2050, 2, BF16),
    ),
    "turns": CheckedKernel(
        "the same bits, 200 calls on two inputs in turn",
        checks.check_turns,
        (
            Shape(64, 151_936, 20, BF16),
            Shape(1536, 32_000, 20, BF16),
            Shape(133, 65_024, 20, BF16),
            Shape(4, 50_257, 20, F32),
            Shape(96, 32_000, 20, BF16),
            Shape(256, 100_352, 20, BF16),
            Shape(512, 32_768, 20, BF16),
        ),
        tuple(Shape(rows, v, 20, BF16) for rows in (1, 64, 256) for v in VOCABULARIES.values()),
        Shape(2, 2050, 2, BF16),
        rehearsed_check=functools.partial(checks.check_turns, calls=2),
    ),
    "greedy": CheckedKernel(
        "greedy choices with logprobs",
        checks.check_greedy,
        (Shape(64, 131_072, 20, BF16), Shape(16, 50_257, 5, F32)),
        tuple(Shape(16, v, 20, d) for v in VOCABULARIES.values() for d in (BF16, F16, F32)),
        Shape(2, 2048, 1, F32),
    ),
    "groups": CheckedKernel(
        "read of sampled rows",
        checks.check_groups,
        (Shape(64, 151_936, 20, BF16), Shape(16, 50_257, 20, F32)),
        tuple(Shape(16, v, 20, d) for v in VOCABULARIES.values() for d in (BF16, F16, F32)),
        Shape(2, 2050, 2, BF16),
    ),
    "draws": CheckedKernel(
        "draw of a token",
        checks.check_draws,
        (Shape(3, 151_936, 64, BF16), Shape(3, 50_257, 4, F32)),
        tuple(Shape(3, v, 8, d) for v in VOCABULARIES.values() for d in (BF16, F16, F32)),
        Shape(3, 4100, 4, F32),
        ("mosaic_gpu",),
    ),
    "ranks": CheckedKernel(
        "count of larger logits",
        checks.check_ranks,
        (Shape(16, 151_936, 0, BF16), Shape(8, 50_257, 0, F32)),
        (),
        Shape(5, 2050, 0, BF16),
        ("mosaic_gpu",),
    ),
    "changes": CheckedKernel(
        "masks and biases",
        checks.check_changed_rows,
        (Shape(64, 151_936, 20, BF16), Shape(8, 50_257, 5, F32)),
        tuple(Shape(8, v, 20, d) for v in VOCABULARIES.values() for d in (BF16, F16, F32)),
        Shape(2, 2050, 2, F32),
    ),
    "candidates": CheckedKernel(
        "candidates of sampled rows",
        checks.check_candidates,
        (Shape(16, 151_936, 1024, BF16),),
        (Shape(16, 50_257, 1024, F32),),
        Shape(2, 2050, 2, F32),
    ),
    "edges": CheckedKernel(
        "every edge of the contract",
        checks.check_edges,
        # Of 7 rows in two launches of a GPU, of 21 in one.
        tuple(
            Shape(rows, v, k, dtype)
            for v, k, dtype in ((50_257, 20, BF16), (131_072, 5, F32), (50_257, 0, F16))
            for rows in (7, 21)
        ),
        tuple(
            Shape(rows, v, 20, dtype)
            for v in VOCABULARIES.values()
            for dtype in (BF16, F16, F32)
            for rows in (7, 21)
        ),
        Shape(7, 2050, 2, BF16),
    ),
    "verify": CheckedKernel(
        "a whole verification",
        checks.check_verify,
        (Shape(16, 151_936, 20, BF16),),
        (Shape(16, 50_257, 20, F32),),
        Shape(3, 2050, 2, F32),
    ),
}
TIMES, PEERS = "times", "peers"


def parts_of(backend: str) -> tuple[str, ...]:
    """The names of what is checked of a backend: its kernels, then times, then peers."""
    kernels = (name for name, part in CHECK_PARTS.items() if backend in part.backends)
    return (*kernels, TIMES, PEERS)


def pieces_of(
    part: str, kernels: Kernels, backend: str, *, full: bool, rehearse: bool
) -> Iterator[Piece]:
    """The pieces of a part, in order of what they tell; one, small, in a rehearsal."""
    from pallas_kernels.testing import peers, times

    if part == TIMES:
        shapes = (times.REHEARSED,) if rehearse else times.SHAPES + times.MORE * full
        for job, shape in dict.fromkeys(shapes):
            name = f"{TIMES}: {job} {_named(shape)}"
            yield Piece(name, functools.partial(times.measure, job, shape, backend, rehearse))
    elif part == PEERS:
        installed = [name for name, module in peers.missing(backend).items() if module is None]
        calls = {name: peers.calls_of(name, full=full) for name in installed}
        in_turn = itertools.zip_longest(*([(name, x) for x in calls[name]] for name in installed))
        named_calls = [call for turn in in_turn for call in turn if call is not None]
        if rehearse:
            named_calls = [
                (name, (peers.ALL[name].job, peers.REHEARSED_PEERS[peers.ALL[name].job]))
                for name in installed
            ]
        for name, (job, shape) in named_calls:
            measure = functools.partial(peers.measure_peers, name, job, shape, rehearse)
            yield Piece(f"{PEERS}: {name}: {job} {_named(shape)}", measure)
    else:
        plan = CHECK_PARTS[part]
        part_shapes = (plan.rehearsed,) if rehearse else plan.shapes + plan.more * full
        check = plan.rehearsed_check if rehearse and plan.rehearsed_check else plan.check
        for shape in dict.fromkeys(part_shapes):
            yield Piece(f"{part}: {_named(shape)}", functools.partial(check, kernels, shape))


def _named(shape: Shape) -> str:
    return f"R={shape.rows} V={shape.vocabulary} K={shape.k} {shape.dtype}"


def check_pieces(pieces: Iterable[Piece], tell: Callable[[dict[str, Any]], None]) -> None:
    """Run pieces; `tell` gets a beginning, and an end with seconds, figures, or what was wrong."""
    for piece in pieces:
        tell({"begin": piece.name})
        begin = time.perf_counter()
        report: dict[str, Any] = {"piece": piece.name, "ok": True}
        usable = True
        try:
            report["figures"] = piece.run()
        except Exception as error:  # reported; the others continue
            traceback.print_exc()
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            text = f"{type(error).__name__}: {' '.join(lines[:6])}"
            report |= {"ok": False, "error": text[:400]}
            usable = isinstance(error, AssertionError)
        tell(report | {"seconds": round(time.perf_counter() - begin, 2)})
        if not usable:
            return


def main(arguments: list[str] | None = None, kernels: Kernels | None = None) -> int:
    """See the module's docstring; exit status 0, whatever the pieces found.

    kernels: stand-ins for the backend's; None: in a rehearsal XLA's, else the backend's own.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("backend", choices=("mosaic_gpu", "mosaic_tpu"))
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    backend: Any = options.backend
    kernels = kernels or checks.by_name("xla" if options.rehearse else backend)
    by_name = {
        piece.name: piece
        for part in parts_of(backend)
        for piece in pieces_of(part, kernels, backend, full=True, rehearse=options.rehearse)
    }

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    check_pieces((by_name[name] for name in options.names), tell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
