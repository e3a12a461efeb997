"""JSON read and written in steps: a large value does not hold up other threads.

The decoder and the encoder of the standard library in C let nobody else run before they are done.
"""

import asyncio
import collections
import json
from collections.abc import AsyncIterator, Callable, Iterator
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from jax_specdec.serve.errors import ApiError, shown

SMALL = 1 << 16  # bytes that C reads within some milliseconds
PART = 1 << 16  # bytes, about, that are written at a time
DEPTH = 6  # containers within one another that are written member by member
Scan = Callable[[str, int], Any]


def parsed(body: bytes, most: int) -> Any:
    """The value of a body; no object in it has a name twice.

    Args:
      body: in UTF-8, UTF-16 or UTF-32.
      most: values that a body above SMALL bytes may hold.

    Raises:
      ApiError: it is not JSON, or holds too many values.
    """
    decoder = _InSteps(most) if len(body) > SMALL else json.JSONDecoder(object_pairs_hook=_unique)
    try:
        return decoder.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


class _InSteps(json.JSONDecoder):
    """The standard library's decoder in Python, which counts values before it makes them."""

    def __init__(self, most: int) -> None:
        super().__init__(object_pairs_hook=_unique)
        self._most, self._count = most, 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = py_make_scanner(self)

    def _array(self, place: tuple[str, int], scan: Scan) -> Any:
        return JSONArray(place, self._counting(scan))

    def _object(self, place: tuple[str, int], strict: bool, scan: Scan, *hooks: Any) -> Any:
        return JSONObject(place, strict, self._counting(scan), *hooks)

    def _counting(self, scan: Scan) -> Scan:
        def counting(text: str, at: int) -> Any:
            self._count += 1
            if self._count > self._most:
                raise ApiError(
                    413,
                    f"the body holds more than {self._most} values, more than all prompts of a "
                    "request may have token ids: send several requests",
                    code="too_large",
                )
            return scan(text, at)

        return counting


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ApiError(400, f"an object has {shown(twice)} twice: name it once")
    return found


_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def pieces(value: Any, depth: int = DEPTH) -> Iterator[str]:
    """The text of a JSON value, in pieces.

    Args:
      value: of what JSON knows; iterators in it are written as lists, and functions stand for what
        they return once their turn has come.
      depth: of the containers that are written member by member.
    """
    if callable(value):
        value = value()
    if depth and value and isinstance(value, dict):
        before = "{"
        for name, one in value.items():
            yield f"{before}{_encoded(name)}:"
            yield from pieces(one, depth - 1)
            before = ","
        yield "}"
    elif isinstance(value, Iterator) or (depth and isinstance(value, list)):
        yield "["
        before = ""
        for one in value:
            yield before
            yield from pieces(one, depth - 1)
            before = ","
        yield "]"
    else:
        yield _encoded(value)


class Writer:
    """Writes large JSON in a thread, one part of one answer at a time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def parts(self, texts: Iterator[str]) -> AsyncIterator[bytes]:
        """The texts, joined to parts of PART bytes at least, except for the last one."""
        size = PART
        while size >= PART:
            async with self._lock:
                part = await asyncio.to_thread(_part, texts)
            size = len(part)
            yield part


def _part(texts: Iterator[str]) -> bytes:
    size, found = 0, []
    for text in texts:
        found.append(text)
        size += len(text)
        if size >= PART:
            break
    return "".join(found).encode()
