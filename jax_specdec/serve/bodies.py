"""Bodies of requests: bounded each, together and in time while they come, and read as JSON."""

import asyncio
import collections
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request

from jax_specdec.serve.errors import ApiError, shown


def parsed(body: bytes) -> Any:
    """The value of a body of JSON in UTF-8, UTF-16 or UTF-32; no object in it has a name twice.

    Raises:
      ApiError: it is not JSON, or an object has a name twice.
    """
    try:
        return json.loads(body, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ApiError(400, f"an object has {shown(twice)} twice: name it once")
    return entries


class _Body:
    """One of them, as far as it has come."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.limit: asyncio.Timeout | None = None
        self.dropped = False


class Bodies:
    """Receives bodies; where they are too large together, the one goes that has come for longest.

    So nobody keeps others out by bodies that are never complete.
    """

    def __init__(self, *, bytes_each: int, together: int, seconds: float) -> None:
        """Begin with none.

        Args:
          bytes_each: bytes that one may have.
          together: bytes of all that are on their way or in the hands of `received`'s caller.
          seconds: that a client may take to send one.
        """
        self._bytes_each, self._together, self._seconds = bytes_each, together, seconds
        self.coming: dict[_Body, None] = {}
        self.num_bytes = 0

    @contextlib.asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request; it counts until the block ends.

        Raises:
          ApiError: it is too large or too slow, made room for others, or its client has left.
        """
        if int(request.headers.get("content-length") or 0) > self._bytes_each:
            raise self._too_large()
        body = _Body()
        self.coming[body] = None
        try:
            async with asyncio.timeout(self._seconds) as body.limit:
                async for part in request.stream():
                    self._take(body, part)
            del self.coming[body]
            yield bytes(body.data)
        except TimeoutError:
            if body not in self.coming and not body.dropped:  # of the block, and not of the body
                raise
            raise self._late(body) from None
        except ClientDisconnect:
            raise ApiError(408, "the client has left", code="client_left") from None
        finally:
            self.coming.pop(body, None)
            self.num_bytes -= len(body.data)

    def _take(self, body: _Body, part: bytes) -> None:
        """Add what has come of a body, and make room for it."""
        if len(body.data) + len(part) > self._bytes_each:
            raise self._too_large()
        body.data += part
        self.num_bytes += len(part)
        while self.num_bytes > self._together:
            longest = next(iter(self.coming))
            if longest is body:
                raise ApiError(
                    429,
                    f"bodies of {self._together} bytes are on their way, as many as may "
                    "(8 of --max-body): try again later",
                    code="too_many_requests",
                )
            self._drop(longest)

    def _drop(self, body: _Body) -> None:
        del self.coming[body]
        self.num_bytes -= len(body.data)
        body.data.clear()
        body.dropped = True
        assert body.limit is not None
        body.limit.reschedule(asyncio.get_running_loop().time())

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body has more than {self._bytes_each} bytes (--max-body)", code="too_large"
        )

    def _late(self, body: _Body) -> ApiError:
        if body.dropped:
            return ApiError(
                429,
                f"bodies of {self._together} bytes are on their way, as many as may (8 of "
                "--max-body), and this one has come for the longest time: send it once more",
                code="too_many_requests",
            )
        return ApiError(
            408, f"the body did not come in {self._seconds:g} seconds (--client-timeout)"
        )
