"""One side's numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RingCounters:
    """One side's numbers at one moment. They only grow, except `depth`.

    Attributes:
      messages: sent (writer) or received (reader) so far; also the next sequence number.
      payload_bytes: the sum of their payloads.
      depth: messages sent and not yet received; a hint, as the other side keeps changing it.
      capacity: the largest depth.
      waits: calls that had to wait: for a free slot (writer), for a message (reader).
      wait_ns: time spent in those waits, in ns.
    """

    messages: int
    payload_bytes: int
    depth: int
    capacity: int
    waits: int
    wait_ns: int
