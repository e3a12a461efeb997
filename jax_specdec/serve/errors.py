"""Errors as OpenAI's API words them: a status, and a body that a client library reads.

Source: https://platform.openai.com/docs/guides/error-codes
"""

import json
from typing import Any


class ApiError(Exception):
    """A request that is answered by an error.

    Attributes:
      status: of HTTP.
      message: for a person; names the value, the limit and the way out.
      param: the field that is wrong, where one is.
      code: for a program.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        self.message = encodable(message)
        self.param = None if param is None else encodable(param[:MAX_SHOWN])

    @property
    def body(self) -> dict[str, Any]:
        """The JSON value that the API answers with."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, _FAULTS[self.status // 100]),
                "param": self.param,
                "code": self.code,
            }
        }


def unfit(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The error of a request whose field `param` has a value that is not served."""
    return ApiError(400, message, param=param, code=code)


MAX_SHOWN = 80  # characters of a value


def shown(value: Any) -> str:
    """The beginning of a value as JSON; a large one is not written whole for that."""
    text = ""
    for piece in json.JSONEncoder(default=str).iterencode(_cut(value)):
        text += piece
        if len(text) > MAX_SHOWN:
            return f"{text[:MAX_SHOWN]}..."
    return text


def _cut(value: Any) -> Any:
    return value[: MAX_SHOWN + 1] if isinstance(value, str) else value


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs, which UTF-8 has not, written as escapes."""
    return text.encode(errors="backslashreplace").decode()


_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_FAULTS = {4: "invalid_request_error", 5: "server_error"}  # of all other statuses, by hundreds
