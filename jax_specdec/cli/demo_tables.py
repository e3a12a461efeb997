"""The tables at the end: requests, workers, and what it took to move the logprobs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jax_specdec.cli.demo_requests import Collector, Output
from jax_specdec.cli.demo_screen import readable, say
from jax_specdec.engine.updates import WorkerStatus
from jax_specdec.records.batch import FinishReason
from jax_specdec.records.statistics import Statistics
from jax_specdec.wording import counted

_FIXED_BYTES = 530_456  # every message of the seed system, whatever its requests ask for


@dataclass(frozen=True)
class _Layout:
    """The columns of the table of requests, and the space between them."""

    shares: str  # of drafts accepted: "by position", "compact" or "overall"
    sampling: bool = True  # the columns T and end
    plain: bool = False  # no lines between the columns


# The widest first.
_LAYOUTS = (
    _Layout("by position"),
    _Layout("compact"),
    _Layout("compact", plain=True),
    _Layout("overall"),
    _Layout("overall", plain=True),
    _Layout("overall", sampling=False, plain=True),
)


def show(collector: Collector, console: Console) -> None:
    """Print the table of requests in the widest layout that fits, and the cost of transport."""
    for layout in _LAYOUTS:
        table = _table(collector, layout)
        if _width(table, console) <= console.width:
            break
    _print_whole(table, console)
    if not collector.messages:
        return
    mean = collector.message_bytes / collector.messages
    say(
        f"{counted(collector.messages, 'message', ',')}, {collector.message_bytes:,} bytes, of "
        f"which {collector.payload_bytes / collector.message_bytes:.0%} are ids, logprobs and "
        f"token ranks; {mean:,.0f} bytes a message, where a fixed struct with room for 512 slots "
        f"of 6 tokens at K = 20 has {_FIXED_BYTES:,}",
        console,
    )
    say(
        "transport latency, from the worker's send to the engine's own copy (waiting for this "
        f"process to read included): median {collector.latency_us(0.5):.0f} us, "
        f"99 % below {collector.latency_us(0.99):.0f} us",
        console,
    )


def _table(collector: Collector, layout: _Layout) -> Table:
    table = Table(title="Requests", title_justify="left", box=HEAVY_HEAD)
    if layout.plain:
        table.box, table.padding, table.pad_edge = SIMPLE_HEAD, (0, 1, 0, 0), False
    drafted = any(output.request.params.draft_logprobs for output in collector.outputs.values())
    for column in ("id", "K", "T", "end") if layout.sampling else ("id", "K"):
        table.add_column(column, no_wrap=True)
    for column in (
        "tokens",
        "a step",
        {"by position": "drafts accepted", "compact": "% accepted"}.get(layout.shares, "accepted"),
        "mean logprob" if layout.shares == "by position" else "logprob",
        *(("of drafts",) if drafted else ()),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for output in collector.outputs.values():
        table.add_row(*_row(output, layout, drafted))
    table.add_section()
    blank = ("", "", "") if layout.sampling else ("",)
    table.add_row("all", *blank, *_speculation(collector.total, layout), "")
    return table


def _row(output: Output, layout: _Layout, drafted: bool) -> Iterator[str]:
    params, reason = output.request.params, output.finish_reason
    yield output.request.id
    yield "-" if params.logprobs is None else str(params.logprobs)
    if layout.sampling:
        yield f"{params.temperature:g}"
        yield readable(reason) if reason else "unfinished"
    yield from _speculation(output.statistics or Statistics(), layout)
    yield _mean(output.mean_logprob)
    if drafted:
        yield _mean(output.mean_draft_logprob)


def _mean(logprob: float | None) -> str:
    return "-" if logprob is None else f"{logprob:.3f}"


def show_workers(statuses: Sequence[WorkerStatus], collector: Collector, console: Console) -> None:
    """Print what each worker did; its messages and bytes add up to those that `show` prints."""
    table = Table(title="Workers", title_justify="left", box=HEAVY_HEAD)
    table.add_column("rank", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for column in ("messages", "bytes", "tokens", "handed over", "preempted"):
        table.add_column(column, justify="right", no_wrap=True)
    for status in statuses:
        finished = dict(zip(FinishReason, status.processor.finished, strict=True))
        table.add_row(
            str(status.process_rank),
            "prefill" if status.prefill_only else "decode",
            f"{collector.messages_of[status.process_rank]:,}",
            f"{collector.bytes_of[status.process_rank]:,}",
            str(status.statistics.num_tokens),
            str(finished[FinishReason.PREFILL_HANDOVER]),
            str(status.processor.preempted),
        )
    _print_whole(table, console)


def _print_whole(table: Table, console: Console) -> None:
    """Print a table; in a terminal that is too narrow, lines wrap, but no number is cut."""
    table.width = _width(table, console)
    console.print(table, soft_wrap=table.width > console.width)


def _width(table: Table, console: Console) -> int:
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def _speculation(found: Statistics, layout: _Layout) -> tuple[str, str, str]:
    """The cells for tokens, tokens a step, and shares of drafts accepted."""
    if layout.shares == "overall":
        shares = [] if found.acceptance_rate is None else [f"{found.acceptance_rate:.0%}"]
    elif layout.shares == "compact":
        shares = [f"{100 * share:.0f}" for share in found.acceptance_at]
    else:
        shares = [f"{share:.0%}" for share in found.acceptance_at]
    length = found.average_accepted_length
    return (
        str(found.num_tokens),
        "-" if length is None else f"{length:.2f}",
        " ".join(shares) or "-",
    )
