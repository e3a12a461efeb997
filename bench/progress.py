"""One line on the terminal that shows the progress of a long measurement."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each of `total` parts; without a terminal it shows nothing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Redrawn by hand: a thread that redraws would take time from the measurement.
    with Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(title, total=total)

        def advance() -> None:
            progress.update(task, advance=1, refresh=True)

        progress.refresh()
        yield advance
