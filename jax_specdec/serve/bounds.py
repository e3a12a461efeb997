"""The share that one client may take from the others, and the server's names."""

from dataclasses import dataclass

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_URL = 4096  # bytes of a path with its query
MAX_HEADERS = 64
MAX_HEAD = 1 << 15  # bytes of a request's line and headers together
BODIES = 8  # the largest bodies that may be on their way at once
# A token is a number with its comma in JSON, or a word in which characters may be escaped; the rest
# is for the other fields.
BODY_BYTES_A_TOKEN, BODY_BYTES = 64, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """The share that one client may take from the others.

    Attributes:
      max_body: bytes of a body; None: by the length of a request (`body_bytes`).
      max_open: requests that are answered at once.
      max_connections: connections at once.
      max_prompt_logprobs: prompt tokens times K times choices, of one request that asks for the
        prompt's logprobs.
      timeout: seconds of one request; None for no limit.
      client_timeout: seconds that a client may take to send the head of a request, to send its
        body, and to read each part of an answer.
      linger: seconds in which what still comes behind an early answer is dropped: the end of a
        connection on which bytes arrive would take the answer away from its client.
      allowed_hosts: names, without ports, by which clients may call the server; None: any.
    """

    max_body: int | None = None
    max_open: int = 1024
    max_connections: int = 1024
    max_prompt_logprobs: int = 1024 * 20 * 8
    timeout: float | None = 600.0
    client_timeout: float = 30.0
    linger: float = 1.0
    allowed_hosts: frozenset[str] | None = None

    def body_bytes(self, max_length: int) -> int:
        """The most bytes of a body, where a request has `max_length` tokens at most."""
        if self.max_body is not None:
            return self.max_body
        return BODY_BYTES + BODY_BYTES_A_TOKEN * max_length


def host_name(header: str) -> str:
    """The name in a Host header, without the port and in lower case."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    if name.count(":") > 1:  # an address of IPv6, as --host has it
        return name
    return name.partition(":")[0].removesuffix(".")
