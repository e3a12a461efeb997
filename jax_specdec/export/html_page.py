"""A page that shows every token's logprob: OpenAI-style responses to one HTML file.

The page loads nothing, and what a token says is data in it: never markup, never a script. The data
is columns in compressed blocks (`page_data.py`), and the script draws only what is seen of it.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from jax_specdec.export import response_files
from jax_specdec.export.page_data import packed
from jax_specdec.export.response_files import ViewError
from jax_specdec.export.shown import Shown, Strings

__all__ = ["View", "ViewError", "page", "read"]

# The script's parts, in the order in which they run.
SCRIPTS = ("data", "numbers", "summary", "text", "panel", "find", "main")


@dataclass(frozen=True)
class View:
    """The responses of one file, or of two to compare.

    Attributes:
      strings: the tokens' strings, numbered; of all files.
      files: the responses of each file.
      names: what the files are called.
    """

    strings: Strings = field(default_factory=Strings)
    files: list[list[Shown]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, lines: Iterable[str], name: str = "") -> None:
        """Read another file.

        Raises:
          ViewError: it holds something other than responses.
        """
        self.files.append(response_files.read(lines, self.strings))
        self.names.append(name)

    @property
    def num_responses(self) -> int:
        return sum(map(len, self.files))

    @property
    def num_tokens(self) -> int:
        """Tokens emitted, without those of prompts."""
        return sum(len(one.tokens) - one.num_prompt for file in self.files for one in file)


def read(lines: Iterable[str]) -> View:
    """The responses of one file: one a line, a JSON array, or a batch's output.

    Raises:
      ViewError: it holds something other than responses.
    """
    view = View()
    view.add(lines)
    return view


def page(view: View, title: str) -> str:
    """A whole HTML document that refers to nothing outside of itself.

    With two files, responses stand side by side: those of one id, if all ids are told apart and
    some are in both files, otherwise the first beside the first and so on.
    """
    parts = Path(__file__).with_name("page")
    style = (parts / "page.css").read_text(encoding="utf-8")
    scripts = [(parts / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n' + "\n".join(scripts)
    # The browser runs this script and no other, such as one smuggled in by a token.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    # In one pass, as a title may hold the names of placeholders.
    text = (parts / "page.html").read_text(encoding="utf-8")
    drawn, details = packed(view.files, view.names, list(view.strings))
    values = {
        "policy": _escaped(policy),
        "title": _escaped(title),
        "style": style,
        "script": script,
        "drawn": drawn,
        "details": details,
    }
    return re.sub(r"{{(\w+)}}", lambda found: values[found[1]], text)


def _hash(text: str) -> str:
    """The name of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    for character, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(character, f"&{name};")
    return text
