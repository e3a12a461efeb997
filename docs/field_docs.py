"""What the fields of named tuples are: what their source says of each, in place of Python's alias.

A class says it in its docstring, under "Attributes:", or in comments: behind a field, or above it.
"""

import inspect
import re
import textwrap

FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$")
ENTRY = re.compile(r"^  (\w[\w, ]*?): (.*)$")
ALIAS = "Alias for field number"


def field_docs(cls: type) -> dict[str, str]:
    """The text of each field that has one, by its name."""
    return _from_comments(inspect.getsource(cls)) | _from_docstring(inspect.getdoc(cls) or "")


def _from_docstring(text: str) -> dict[str, str]:
    """The entries under "Attributes:"; of several names, each has the text."""
    _, _, section = text.partition("Attributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.split("\n"):
        if line and not line.startswith("  "):
            break
        if entry := ENTRY.match(line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif names and line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _from_comments(source: str) -> dict[str, str]:
    """The comments behind fields; of one without, those that stand right above it."""
    found, above, last = {}, [], ""
    for line in textwrap.dedent(source).split("\n"):
        if line.lstrip().startswith("#"):
            above.append(line.strip("# ").rstrip())
        elif field := FIELD.match(line):
            last = field[1]
            text = field[2] or " ".join(above)
            if text:
                found[last] = text
            above = []
        elif last and line.startswith("    def "):
            break
        else:
            above = []
    return found
