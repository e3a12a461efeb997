"""The host's check of a packed message, before it is sent."""

import numpy as np

from ipc import wire


class DeviceCheckError(RuntimeError):
    """A message that failed a check on the device while it was packed; it is not sent."""


def check(words: np.ndarray) -> np.ndarray:
    """The message in a bucket of words, if the checks on the device passed.

    Raises:
      DeviceCheckError: a check failed; names the step and the checks.
    """
    # Python's integers: three reads through NumPy would take ten times as long.
    header = words[: wire.HEADER_WORDS].tolist()
    num_words = _field(header, "num_words")
    if num_words > words.size:
        raise DeviceCheckError(
            f"a message of {num_words} words is longer than the {words.size} that its slots "
            "can fill; nothing of it was sent"
        )
    if _field(header, "error"):
        checks = _field(header, "error_checks")
        step = _field(header, "step_high") << 32 | _field(header, "step_low")
        raise DeviceCheckError(
            f"step {step} failed its checks on the device "
            f"({', '.join(wire.failed_checks(checks))}); nothing of it was sent"
        )
    return words[:num_words]


def _field(header: list[int], name: str) -> int:
    field = wire.HEADER[name]
    return header[field.word] >> field.shift & field.maximum
