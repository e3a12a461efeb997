"""What the host looks at before a packed message is sent. Never jax."""

import numpy as np

from ipc import wire
from jax_specdec.decode import failed_checks


class DeviceCheckError(RuntimeError):
    """A check on the device failed while a message was packed: the message is not sent."""


def check(words: np.ndarray) -> np.ndarray:
    """The message in a bucket of words, if the checks on the device passed.

    Raises:
      DeviceCheckError: they did not.
    """
    num_words = int(wire.HEADER["num_words"].get(words))
    if num_words > words.size:
        raise DeviceCheckError(
            f"a message of {num_words} words is longer than the {words.size} that its slots "
            "can fill; nothing of it was sent"
        )
    if wire.HEADER["error"].get(words):
        checks = int(wire.HEADER["error_checks"].get(words))
        step = int(wire.HEADER["step_low"].get(words))
        raise DeviceCheckError(
            f"step {step} failed its checks on the device ({', '.join(failed_checks(checks))});"
            " nothing of it was sent"
        )
    return words[:num_words]
