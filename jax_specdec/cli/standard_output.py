"""What a person sees of a run: texts, in styles on a terminal, and before them what workers do."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from jax_specdec.cli.starting import Phases, Starting, repeated

Show = Callable[[str, str], None]
Style = Callable[[float | None, bool], str]


def shower(*, quiet: bool) -> tuple[Show, Style | None]:
    """What `generate.TextsInOrder` takes to show texts, or to show none.

    On a terminal, texts are in styles, and without control codes.
    """
    if quiet:
        return _discard, None
    if not sys.stdout.isatty():
        return _write, None
    from rich.console import Console
    from rich.text import Text

    from jax_specdec.cli import token_colors

    console = Console()
    styles = {"title": "bold", "prompt": "dim", "text": "", "error": "red"}

    def show(kind: str, text: str) -> None:
        shown = Text(token_colors.harmless(text), styles.get(kind, kind))
        console.print(shown, end="", soft_wrap=True)

    return show, token_colors.style


@contextlib.contextmanager
def waiting(phases: Phases) -> Iterator[Callable[[], None]]:
    """Show what workers do, where standard error is a terminal.

    Yields a function that ends it, and may be called several times.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.text import Text

    line = Starting(phases).line
    with (
        Console(stderr=True).status("") as status,
        repeated(lambda: status.update(Text(line()))) as end,
    ):

        def begun() -> None:
            end()
            status.stop()

        yield begun


def explain_colors() -> None:
    """Print what the colors mean."""
    from rich.console import Console

    from jax_specdec.cli import token_colors

    token_colors.legend(Console(), unknown=False)


def _discard(kind: str, text: str) -> None:
    """Show nothing."""


def _write(kind: str, text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error
