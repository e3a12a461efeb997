"""The rows of the measured tables: what each one says, beside what, and where it is read."""

import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from bench.report.comparison import Comparison, middle_half
from bench.report.files import Results
from bench.timing import readable

NOT_MEASURED = "not measured"
Newest = dict[str, tuple[Comparison, Results]]  # by title


class Platforms(NamedTuple):
    """What was measured where: the table's columns."""

    cpu: Newest
    gpu: Newest
    tpu: Newest


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    what: str
    beside: str
    title: str  # a pattern of the comparison's title
    value: Callable[[Comparison], str]
    device: bool = True  # whether a GPU or a TPU would change it
    in_readme: bool = False  # README has at most ten; docs/measurements.md has all


def faster(peer: str, *ours: str) -> Callable[[Comparison], str]:
    """The speed over `peer` of the first of `ours` that was measured, and its slowest hundredth."""

    def value(one: Comparison) -> str:
        name = next(name for name in ours if name in one.names)
        factor = one.speedup(name, peer)
        digits = 0 if factor >= 20 else 1
        slowest = one[name].percentiles.get("p99")
        of_messages = "" if slowest is None else f" (p99 {readable(slowest)})"
        return f"{factor:.{digits}f}x the speed, {readable(one[name].median)}{of_messages}"

    return value


def share(name: str) -> Callable[[Comparison], str]:
    """The share of the baseline's tokens a second, its middle half, and what a step adds.

    Where the middle half contains 100 %, the cost is within noise, and there is no figure of it.
    """

    def value(one: Comparison) -> str:
        low, high = (100 * share for share in middle_half(one.kept(name)))
        figures = one.figures[name]
        kept = f"{figures['% of tokens/s']:.0f} % ({low:.0f} to {high:.0f})"
        if low <= 100 <= high:
            return f"within noise: {kept}"
        return f"{kept}, {figures['adds us']:+,.0f} us a step"

    return value


def kept(name: str) -> Callable[[Comparison], str]:
    """The share of the baseline's speed that is left, and its middle half over the rounds."""

    def value(one: Comparison) -> str:
        low, high = (100 * share for share in middle_half(one.kept(name)))
        middle = 100 * statistics.median(one.kept(name))
        return f"{middle:.0f} % ({low:.0f} to {high:.0f})"

    return value


def figure(name: str, key: str, unit: str) -> Callable[[Comparison], str]:
    """One counted figure of a contender."""
    return lambda one: f"{one.figures[name][key]:,.0f} {unit}"


KERNEL = r"topk_logprobs R=64 V=131072 K={} float32$"
RECORDS = r"^bytes to records: 256 .* K = 20$"
LOOP = r"^decoding 64 greedy .*(tiny model|1B)"
WIDE = r"^decoding 64 greedy .*(random model|1B)"
SAMPLED = r"^decoding 64 sampled .*(random model|1B)"
PLAIN, NO_LOGPROBS = "`log_softmax` + `top_k` + gather + count", "the loop without logprobs"
KERNEL_SPEED = faster("log_softmax + top_k", "mosaic_gpu", "mosaic_tpu", "xla")


def _loop(name: str, in_readme: bool = False) -> Row:
    what = f"tokens/s of the whole loop, {name}"
    return Row(what, NO_LOGPROBS, LOOP, share(name), in_readme=in_readme)


def _wide(name: str, in_readme: bool = False) -> Row:
    what = f"tokens/s, large vocabulary, {name}"
    return Row(what, NO_LOGPROBS, WIDE, share(name), in_readme=in_readme)


def _sampled(kind: str) -> Row:
    """Sampled rows with raw logprobs, beside a plain sampler and the logprobs alone."""
    ours, alone = "verify, draw and logprobs", "topk_logprobs, K = 20"
    quicker = faster("plain JAX sampler", ours)

    def value(one: Comparison) -> str:
        over = one[ours].median / one[alone].median
        return f"{quicker(one)}, {over:.1f}x the time of the logprobs alone"

    title = rf"^sampling R=64 V=151936 bfloat16, {kind}, real-like$"
    return Row(f"sampled: 64 x 151936, {kind}, K = 20 raw", "a plain JAX sampler", title, value)


ROWS = (
    Row("logprobs of 64 x 131072 logits, K = 0", PLAIN, KERNEL.format(0), KERNEL_SPEED),
    Row("logprobs of 64 x 131072 logits, K = 20", PLAIN, KERNEL.format(20), KERNEL_SPEED,
        in_readme=True),
    Row("16 KB to another process, every 5 ms", "ZeroMQ and msgpack", r"^16 KB, 5 ms[^,]*$",
        faster("ZeroMQ msgpack", "ring"), device=False),
    Row("the same", "`multiprocessing.Pipe`, raw bytes", r"^16 KB, 5 ms[^,]*$",
        faster("multiprocessing.Pipe", "ring"), device=False),
    Row("the same, beside two busy loops", "ZeroMQ and msgpack", r"^16 KB, 5 ms.*busy loops$",
        faster("ZeroMQ msgpack", "ring"), device=False),
    Row("16 KB, one after the other", "`multiprocessing.Queue`", r"^16 KB, hot$",
        faster("multiprocessing.Queue", "ring"), device=False),
    Row("16 KB, one after the other", "`multiprocessing.Pipe`, raw bytes", r"^16 KB, hot$",
        faster("multiprocessing.Pipe", "ring"), device=False),
    Row("16 KB, one after the other", "ZeroMQ, raw bytes", r"^16 KB, hot$",
        faster("ZeroMQ raw bytes", "ring"), device=False),
    Row("the same, beside two busy loops", "ZeroMQ, raw bytes", r"^16 KB, hot.*busy loops$",
        faster("ZeroMQ raw bytes", "ring"), device=False),
    Row("530 KB to another process, every 5 ms", "ZeroMQ, `copy=False`", r"^530 KB, 5 ms",
        faster("ZeroMQ copy=False", "ring"), device=False, in_readme=True),
    Row("530 KB, one after the other", "ZeroMQ, `copy=False`", r"^530 KB, hot",
        faster("ZeroMQ copy=False", "ring"), device=False, in_readme=True),
    Row("bytes to records, 256 requests x 3 tokens, K = 20", "lists a token", RECORDS,
        faster("lists a token", "columns (ours)"), device=False, in_readme=True),
    Row("bytes to records, 256 requests x 3 tokens, K = 20", "objects in dictionaries", RECORDS,
        faster("objects in dicts", "columns (ours)"), device=False),
    _loop("K = 0"),
    _loop("K = 5"),
    _loop("K = 20", in_readme=True),
    _loop("K = 20 and draft logprobs", in_readme=True),
    _loop("K = 20 for 1 of 64"),
    _wide("K = 20", in_readme=True),
    _wide("K = 20, naive kernel"),
    _wide("K = 20, objects in dicts"),
    _wide("K = 20, the usual way", in_readme=True),
    Row("tokens/s, large vocabulary, sampled, K = 20 processed", NO_LOGPROBS, SAMPLED,
        share("K = 20, processed")),
    Row("steps/s, large vocabulary, sampled (T = 0.8, top-p 0.95)", "the greedy loop", SAMPLED,
        figure("no logprobs", "% of greedy steps/s", "%"), in_readme=True),
    *(_sampled(kind) for kind in ("temperature 1", "top-k 50", "top-p 0.9", "min-p 0.02", "mixed")),
    Row("strings and bytes of a step's ids, 64 requests, K = 20", "`tokenizers`, `decode` each",
        r"^ids to strings and bytes: 64 .* K = 20$",
        faster("tokenizers, decode each", "table an id (ours)"), device=False),
    Row("tokens/s of 256 requests on a cluster of one replica, 5 ms a step", "an engine here",
        r"^256 requests, K = 5, .* 5 ms a step$", kept("RayEngine, one replica"), device=False),
    Row("the same, the worker as fast as it is read", "an engine here",
        r"^256 requests, K = 5, .* as fast as it is read$", kept("RayEngine, one replica"),
        device=False),
    Row("importing the engine's side", "numpy and jax", r"^importing, in a fresh process$",
        faster("numpy and jax", "numpy and the engine side"), device=False),
    Row("device array to records, 64 requests, K = 20", "at most 500 us", LOOP,
        figure("K = 20", "host us", "us")),
    Row("bytes of a step, 64 requests, K = 20", "530,456 in a fixed struct", LOOP,
        figure("K = 20", "bytes", "bytes"), in_readme=True),
)  # fmt: skip


def table(rows: Iterable[Row], platforms: Platforms) -> tuple[list[str], dict[str, Results]]:
    """The lines of a Markdown table, and the results that it was read from, by file name."""
    lines = ["| What | Beside | Two CPU cores | GPU | TPU |", "| --- | --- | --- | --- | --- |"]
    used: dict[str, Results] = {}
    for row in rows:
        cells = []
        for there in platforms:
            text = NOT_MEASURED if row.device or there is platforms.cpu else "-"
            for title, (comparison, source) in there.items():
                if re.search(row.title, title) and (value := _value(row, comparison)):
                    text = value
                    used[source.path.name] = source
            cells.append(text)
        lines.append(f"| {row.what} | {row.beside} | {' | '.join(cells)} |")
    return lines, used


def _value(row: Row, comparison: Comparison) -> str | None:
    """What the row says of a comparison; None where that did not measure it."""
    try:
        return row.value(comparison)
    except (KeyError, StopIteration):
        return None
