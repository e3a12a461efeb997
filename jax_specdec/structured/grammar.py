"""A structure, as a request has it, in the words of llguidance."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

from jax_specdec.requests import RequestError, Structured
from jax_specdec.structured.bounds import check_schema

# Between the tokens of JSON. Without a bound, a model may go on with it until its last token.
WHITE_SPACE = r" ?|\n {0,32}"
# The extra `structured`: the name is found wherever this package came from.
_INSTALL = "pip install 'llguidance>=1.9'"


def library() -> Any:
    """llguidance, imported by who needs it.

    Raises:
      RequestError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(f"structured answers need llguidance: {_INSTALL}") from error
    return llguidance


def grammar_of(structured: Structured) -> str:
    """The grammar of a structure.

    Raises:
      RequestError: the text is not of its kind. Most mistakes show only when it is compiled.
    """
    kind, text = structured
    made: str
    try:
        if kind == "choice":
            made = _of_choice(json.loads(text))
        else:
            if kind == "json_schema":
                schema = json.loads(text)
                check_schema(schema)
                # Written again: the library puts it into another JSON text as it stands.
                text = json.dumps(with_white_space(schema))
            elif kind == "grammar":
                for schema in _schemas_in(text):
                    check_schema(schema)
                # The library looks at blank lines again and again.
                text = "\n".join(line for line in text.split("\n") if line.strip())
            made = library().grammar_from(kind, text)
    except (ValueError, TypeError, RecursionError) as error:
        raise refused(kind, str(error)) from error
    return made


def refused(kind: str, why: str) -> RequestError:
    """The error of a structure that cannot be served."""
    return RequestError(f"structured: the {kind} cannot be served: {' '.join(why.split())[:500]}")


def with_white_space(schema: Any) -> Any:
    """A JSON schema with `WHITE_SPACE` as its rule, unless it has one of its own.

    Raises:
      ValueError: its settings are none.
    """
    if not isinstance(schema, dict):
        return schema
    settings = schema.get("x-guidance", {})
    if not isinstance(settings, dict):
        raise ValueError(f"x-guidance = {json.dumps(settings)[:80]} must be an object")
    return schema | {"x-guidance": {"whitespace_pattern": WHITE_SPACE} | settings}


def _schemas_in(text: str) -> Iterator[Any]:
    """The JSON schemas in a grammar in Lark, each behind a %json."""
    decoder = json.JSONDecoder()
    for match in re.finditer(r"%json\s+", text):
        with contextlib.suppress(ValueError):  # the library says what is wrong with it
            # A part of the text: an error counts the lines before its place.
            yield decoder.raw_decode(text[match.end() :])[0]


def _of_choice(texts: Any) -> str:
    if not (isinstance(texts, list) and texts and all(isinstance(choice, str) for choice in texts)):
        raise ValueError("it must be a JSON list of strings, one at least")
    words = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in texts if choice)
    if not words:
        return 'start: ""'
    # A single lexeme: as rules, thousands of words would be read side by side.
    return f"start: WORD{'?' if '' in texts else ''}\nWORD: {words}"
