"""Errors as OpenAI's API words them: a status, and a body that a client library reads.

Source: https://platform.openai.com/docs/guides/error-codes
"""

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
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON value that the API answers with."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "server_error"),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
