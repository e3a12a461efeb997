"""`jax-specdec view`: a file of responses as a page."""

import argparse
import sys
import webbrowser
from pathlib import Path

from jax_specdec.export import html_page
from jax_specdec.wording import pluralize

HELP = """\
Write one HTML page of a file that `demo --json` or `generate` wrote, or of any OpenAI-style
responses: one a line, a JSON array, or the output of OpenAI's batch API. Tokens are colored by
logprob, the prompt's too where they are known; hovering over one shows its top K, its rank, whether
it was a draft, and the drafts of its step. The page needs no network: it loads nothing.

With two files, equal ids stand side by side, and tokens can be colored by the difference of their
logprobs. In the page, n goes to the next surprising token, and / to the search.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", type=Path, metavar="FILE", help="responses (JSONL or JSON)")
    parser.add_argument(
        "other", type=Path, metavar="FILE2", nargs="?", help="others to set beside them"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE",
        help="where to write the page (default: FILE with the ending .html)")  # fmt: skip
    parser.add_argument("--title", help="title of the page (default: the names of the files)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def run(options: argparse.Namespace) -> int:
    """Write the page, print where it is, and open it where that is wanted.

    Raises:
      OSError: a file cannot be read or written.
      ValueError: a file holds no responses, or the page would replace it.
    """
    sources: list[Path] = [options.file] + ([options.other] if options.other else [])
    for source in sources:
        if source.is_dir():
            raise ValueError(f"{source} is a folder: name a file of responses in it")
    target: Path = options.output or options.file.with_suffix(".html")
    view = html_page.View()
    for source in sources:
        if target.exists() and source.exists() and target.samefile(source):
            raise ValueError(f"the page would replace {source}: name another file with --output")
        try:
            with source.open(encoding="utf-8-sig") as lines:
                view.add(lines, source.name)
        except (html_page.ViewError, UnicodeDecodeError) as error:
            raise ValueError(f"{source}: {error}") from error
    names = " and ".join(source.name for source in sources)
    page = html_page.page(view, names if options.title is None else options.title)
    try:
        # A file name, which the page shows, need not be UTF-8.
        target.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    responses, tokens = view.num_responses, view.num_tokens
    written = f"{pluralize(responses, 'response')}, {pluralize(tokens, 'token')}"
    sys.stdout.write(f"wrote {written} to {target}\n")
    if options.open:
        _open(target)
    return 0


def _open(page: Path) -> None:
    """Open a page in the user's browser; say so where there is none."""
    address = page.resolve().as_uri()
    if not webbrowser.open(address):
        sys.stderr.write(f"no browser was found: open {address} in one\n")
