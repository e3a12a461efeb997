"""The rounds of a measurement, drawn on the terminal while they run.

Nothing is drawn inside a round: a thread that draws would take time from what is timed.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def rounds_of(title: str, count: int, console: Console | None = None) -> Iterator[int]:
    """The numbers of the rounds, 0 to `count` - 1; a bar moves between two of them.

    Args:
      title: what is measured; it stays on the terminal, the bar goes.
      count: how many rounds.
      console: standard error, unless another is named. A file gets the title alone.
    """
    console = console or Console(stderr=True)
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeRemainingColumn()
    bar = Progress(
        *columns, console=console, auto_refresh=False, transient=True,
        disable=not console.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=count)
        for index in range(count):
            yield index
            bar.advance(task)
            bar.refresh()
