"""Docstrings of this project, which are plain text with `code`, as reStructuredText for Sphinx.

A docstring has paragraphs, lists, indented code, and sections: a line that ends with a colon and an
indented body. A field is `name: text`, with the text's further lines indented.
"""

import re
import textwrap
from collections.abc import Mapping

FIELD = re.compile(r"(?P<name>[\w.*]+(?:, [\w.*]+)*|`[^`]+`): +(?P<text>\S.*)", re.DOTALL)
LIST = re.compile(r"(-|\d+\.) ")
MARKUP = re.compile(r"([\\*|]|(?<=\w)_(?!\w))")


def to_rst(text: str, links: Mapping[str, str]) -> str:
    """The same text in reStructuredText; `links` maps a name to the full name that it links to."""
    return "\n\n".join(_rendered(chunk, links, in_section=False) for chunk in _chunks(text))


def _chunks(text: str) -> list[str]:
    """Split into paragraphs; code and a section's body stay whole, with their blank lines."""
    chunks: list[str] = []
    for part in re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n")):
        part = re.sub(r"::$", ":", part)
        open_body = chunks and (_is_section(chunks[-1]) or chunks[-1].startswith(" "))
        if part.startswith(" ") and open_body:
            chunks[-1] += "\n\n" + part
        elif part.strip():
            chunks.append(part)
    return chunks


def _is_section(chunk: str) -> bool:
    title, *body = chunk.split("\n")
    return title.endswith(":") and bool(body) and all(line[:1] in ("", " ") for line in body)


def _rendered(chunk: str, links: Mapping[str, str], in_section: bool) -> str:
    if chunk.startswith(" "):
        return "::\n\n" + textwrap.indent(textwrap.dedent(chunk), "   ")
    if _is_section(chunk):
        title, _, body = chunk.partition("\n")
        parts = [_rendered(part, links, in_section=True) for part in _chunks(body)]
        return "\n\n".join([f".. rubric:: {_inline(title.rstrip(':'), links)}", *parts])
    items = re.split(r"\n(?! )", chunk)
    if LIST.match(chunk):
        return "\n".join(_inline(item, links) for item in items)
    fields = [FIELD.fullmatch(item) for item in items]
    if all(fields) and (in_section or len(fields) > 1):
        return "\n".join(
            f"``{found['name'].strip('`')}``\n   {_inline(_one_line(found['text']), links)}"
            for found in fields
            if found
        )
    if in_section and len(items) > 1 and any("\n" in item for item in items):
        return "\n".join(f"- {_inline(_one_line(item), links)}" for item in items)
    return _inline(re.sub(r"\n +", "\n", chunk), links)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _inline(text: str, links: Mapping[str, str]) -> str:
    """Escape markup, and make `code` a literal, or a link where its name is known."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backquote too many: none of them is markup
        return MARKUP.sub(r"\\\1", text).replace("`", r"\`")
    for n, part in enumerate(parts):
        if n % 2 == 0:
            # After inline markup, a letter needs a break that is not seen: `name`s.
            gap = r"\ " if n and re.match(r"\w", part) else ""
            parts[n] = gap + MARKUP.sub(r"\\\1", part)
        elif part in links:
            parts[n] = f":py:obj:`{part} <{links[part]}>`"
        else:
            parts[n] = f"``{part}``"
    return "".join(parts)
