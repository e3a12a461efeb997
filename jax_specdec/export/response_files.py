"""Files of responses: one a line, a JSON array, one object, or the output of OpenAI's batch API."""

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from jax_specdec.export.shown import Shown, Strings, shown_of


class ViewError(ValueError):
    """A file holds something other than responses; says where and what is wrong."""


def read_responses(lines: Iterable[str], strings: Strings) -> list[Shown]:
    """The responses of a file, in order; empty lines are skipped.

    A line of a batch's output counts as the response in it, under its `custom_id`. One that failed
    is shown without tokens, its error as the reason why it ended.

    Args:
      lines: of a UTF-8 text. A text that begins with "[", or whose first line is no whole JSON
        value, is one JSON value; any other has one a line. An array, and a list of OpenAI's API,
        counts as what is in it.
      strings: where the tokens' strings are numbered.

    Raises:
      ViewError: there is no response, or one is not as expected.
    """
    shown = []
    for place, value in _values(lines):
        try:
            shown += (_of_batch if "custom_id" in value else shown_of)(value, strings)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise ViewError(
                f"{place} is not a completion or chat completion: {what}; write one with "
                "jax-specdec demo --json FILE"
            ) from error
    if not shown:
        raise ViewError(
            "there is no response in it: write one JSON object a line, or an array of them"
        )
    return shown


def write_responses(file: TextIO, responses: Iterable[object]) -> None:
    """Replace the content of `file` by one response a line; the file is closed where that fails.

    Raises:
      OSError: they cannot be written whole; the earlier content is gone.
    """
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe or /dev/null has nothing to cut
            file.truncate(0)
        for response in responses:
            file.write(json.dumps(response, allow_nan=False) + "\n")
        file.flush()
    except OSError as error:
        with contextlib.suppress(OSError):  # closed later, it would fail where no code catches it
            file.close()
        raise OSError(error.errno, error.strerror, file.name) from error


def _values(lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the JSON values of a file, and the place of each."""
    numbered = enumerate(lines, 1)
    begin, first = next(((number, line) for number, line in numbered if line.strip()), (0, ""))
    if _goes_on(first):
        value = _json("".join([first, *(line for _, line in numbered)]), begin)
        yield from _elements(value, begin)
        return
    for number, line in itertools.chain([(begin, first)], numbered):
        if line.strip():
            yield from _elements(_json(line, number), number)


def _elements(value: Any, number: int) -> Iterator[tuple[str, Any]]:
    """Yield a value that begins on line `number`, or what is in it where it is an array."""
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]  # a list as OpenAI's API writes it
    if not isinstance(value, list):
        yield f"line {number}", value
        return
    for index, element in enumerate(value, 1):
        yield f"element {index} of the array", element


def _goes_on(line: str) -> bool:
    """Whether the JSON value that begins on a line may have other lines too."""
    if line.lstrip().startswith("["):
        return True
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return 0 < len(line.rstrip()) <= error.pos
    except (ValueError, RecursionError):  # of a whole value, which `_json` refuses
        return False
    return False


def _json(text: str, number: int) -> Any:
    """The value of a text that begins on line `number`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line, column = number + error.lineno - 1, error.colno
        raise ViewError(f"line {line} is not JSON: {error.msg} (column {column})") from error
    except (ValueError, RecursionError) as error:  # a number, or nested, beyond what Python reads
        raise ViewError(f"line {number} is not read: {error}") from error


def _of_batch(value: Any, strings: Strings) -> list[Shown]:
    """The responses in a line of a batch's output.

    Source: https://platform.openai.com/docs/guides/batch
    """
    if "body" in value and "response" not in value:
        raise ValueError("it is a batch's input: the output that the batch gave has the responses")
    answer = value["response"] or {}
    body, error = answer.get("body") or {}, value.get("error")
    if "choices" in body:
        return shown_of(body | {"id": value["custom_id"]}, strings)
    error = error or body.get("error") or {}
    reason = error.get("message") or error.get("code") or f"status {answer.get('status_code')}"
    choice = {"text": "", "finish_reason": f"error: {reason}"}
    return shown_of({"id": value["custom_id"], "choices": [choice]}, strings)
