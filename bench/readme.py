"""README's rows beside a run: what README says, what the run has measured, and whether it holds.

Every ratio is the others' time over ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.comparison import Comparison
from bench.host import LISTS, OBJECTS, RECORDS

LEAST = 0.8  # of README's ratio, at which it holds: its machine is another one


class Row(NamedTuple):
    """A row of README's table "What it costs".

    Attributes:
      begins: its first words there.
      suite: what measures it.
      title: of the comparison.
      ours: the contender whose time README shows.
      others: those whose ratios it shows.
    """

    begins: str
    suite: str
    title: str
    ours: str
    others: tuple[str, ...]


ROWS = (
    Row("logprobs of 64 x 131072", "kernels", "topk_logprobs R=64 V=131072 K=20 float32", "xla",
        ("log_softmax + top_k",)),
    Row("530 KB to another process", "ring", "530 KB, hot", "ring",
        ("ZeroMQ copy=False", "multiprocessing.Queue")),
    Row("logprobs of a prompt of 1,024 x 151936", "peers",
        "tpu-inference compute_and_gather_prompt_logprobs R=1024 V=151936 K=20 float32",
        "the adapter", ("tpu-inference",)),
    Row("bytes to records, all arrays read", "host",
        "bytes to records: 256 requests x 3 tokens, K = 20", RECORDS, (LISTS, OBJECTS)),
    Row("verify, draw and raw logprobs of 64 x 151936", "sampling",
        "sampling R=64 V=151936 bfloat16, top-p 0.9, real-like", "verify, draw and logprobs",
        ("plain JAX sampler", "topk_logprobs, K = 20")),
    Row("a step of SmolLM2-135M's loop", "real",
        "decoding at 8 slots, greedy, drafts: ngram, SmolLM2-135M-Instruct", "K = 20",
        ("no logprobs",)),
    Row("from `generate` to SmolLM2-135M's first token", "real",
        "from the command to the first token of generate", "cold", ("kept programs",)),
)  # fmt: skip


def suites() -> tuple[str, ...]:
    """Those that measure README's rows."""
    return tuple(dict.fromkeys(row.suite for row in ROWS))


def closing_lines(
    measured: Sequence[Comparison],
    kept: Mapping[str, Comparison],
    machine: Mapping[str, Any],
) -> Iterator[str]:
    """A line for each of README's rows, and one for the machine.

    Args:
      measured: by this run.
      kept: the results that README's figures are of, by title.
      machine: of this run, as `files.environment` has it.
    """
    by_title = {comparison.title: comparison for comparison in measured}
    for row in ROWS:
        yield f"{row.begins}: " + _compared(row, kept.get(row.title), by_title.get(row.title))
    yield (
        f"{machine['cpus']} cores of {machine['processor']}, load before {machine['load before']}, "
        f"jax {machine['versions']['jax']}"
    )


def ratios(row: Row, comparison: Comparison) -> dict[str, float]:
    """By contender, its time over ours."""
    there = {*comparison.names}
    return {
        name: comparison.speedup(row.ours, name) for name in row.others if {name, row.ours} <= there
    }


def _compared(row: Row, kept: Comparison | None, here: Comparison | None) -> str:
    said = {} if kept is None else ratios(row, kept)
    found = {} if here is None else ratios(row, here)
    if not found:
        more = f"; python -m bench {row.suite} does" if here is None else ": no contender was here"
        return f"README {_shown(said)}; not measured in this run{more}"
    holds = all(found[name] >= LEAST * said.get(name, 0.0) for name in found)
    verdict = "held" if holds else f"NOT HELD (less than {LEAST} of it)"
    return f"README {_shown(said)}; here {_shown(found)}: {verdict}"


def _shown(of: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.3g}x" for name, ratio in of.items()) or "nothing"
