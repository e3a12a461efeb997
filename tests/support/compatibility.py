"""What passed with which versions: `.ci/compatibility.json`, and docs/compatibility.md of it.

    python -m tests.support.compatibility            write the page from what is kept
    python -m tests.support.compatibility WHAT       keep that WHAT passed on this Python and jax

Lanes keep what they passed with: a combination that is there already is not written again.
"""

import datetime
import json
import platform
import sys
from importlib import metadata

from tests.support.paths import ROOT

KEPT, PAGE = ROOT / ".ci" / "compatibility.json", ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- written from .ci/compatibility.json -->\n", "<!-- to here -->\n"
HEAD = "| What passed | Python | jax | First on |\n| --- | --- | --- | --- |\n"


def keep(what, python, jax):
    """Keep that something passed with these versions, and write the page."""
    kept = entries()
    if not any((one["what"], one["python"], one["jax"]) == (what, python, jax) for one in kept):
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        kept.append({"what": what, "python": python, "jax": jax, "date": today})
        kept.sort(key=lambda one: (one["what"], *map(numbers, (one["python"], one["jax"]))))
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page())


def entries():
    """What is kept."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else []


def numbers(version):
    """A version's numbers, to sort by."""
    return [int(part) for part in version.split(".") if part.isdigit()]


def page():
    """The page, with its table made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    rows = [
        f"| {one['what']} | {one['python']} | {one['jax']} | {one['date']} |\n" for one in entries()
    ]
    return before + BEGIN + "\n" + HEAD + "".join(rows) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        keep(" ".join(sys.argv[1:]), platform.python_version(), metadata.version("jax"))
    PAGE.write_text(page())
