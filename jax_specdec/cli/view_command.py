"""`jax-specdec view`: a file of responses as a page."""

import argparse
import sys
from pathlib import Path
from typing import Any

from jax_specdec.wording import counted

HELP = """\
Write one HTML page of a file that `demo --json` or `generate` wrote, or of any OpenAI-style
responses, one a line. Tokens are colored by logprob; hovering over one shows its top K, its rank,
whether it was a draft, and the drafts of its step. The page needs no network: it loads nothing.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "view",
        help="write a page that shows every token's logprob",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="responses, one a line (JSONL)")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PAGE",
        help="where to write the page (default: FILE with the ending .html)",
    )  # fmt: skip
    parser.add_argument("--title", help="title of the page (default: the name of FILE)")


def run(options: argparse.Namespace) -> int:
    """Write the page, and print where it is.

    Raises:
      OSError: a file cannot be read or written.
      ValueError: FILE holds no responses, or the page would replace it.
    """
    from jax_specdec.export import html_page

    source: Path = options.file
    target: Path = options.output or source.with_suffix(".html")
    if target.exists() and source.exists() and target.samefile(source):
        raise ValueError(f"the page would replace {source}: name another file with --output")
    try:
        with source.open(encoding="utf-8") as lines:
            responses = html_page.read(lines)
    except (html_page.ViewError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: {error}") from error
    page = html_page.page(responses, source.name if options.title is None else options.title)
    try:
        # A file name, which the page shows, need not be UTF-8.
        target.write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    num_tokens = sum(len(one.tokens) for one in responses)
    written = f"{counted(len(responses), 'response')}, {counted(num_tokens, 'token')}"
    sys.stdout.write(f"wrote {written} to {target}\n")
    return 0
