"""Words of JAX on a plugin that it cannot use: a line, where an accelerator may be meant.

The CUDA plugin says so with a traceback, also on a machine without a GPU, and a worker's output is
what the reason of its end is taken from.
"""

import logging
from pathlib import Path

SPEAKER = "jax._src.xla_bridge"


class Shortened(logging.Filter):
    """Lets an error of a plugin through as one line; that of CUDA only where there is a GPU."""

    def __init__(self, files: Path = Path("/dev")) -> None:
        """Look for GPUs among `files`."""
        super().__init__()
        self._has_gpu = any(files.glob("nvidia[0-9]*"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written; it may be changed."""
        text = record.getMessage()
        if not (record.exc_info and "plugin" in text):
            return True
        record.msg, record.args = f"{text}: {record.exc_info[1]}", ()
        record.exc_info = record.exc_text = None
        return self._has_gpu or "cuda" not in text


def shorten() -> None:
    """Do so in this process, before JAX looks for devices."""
    logging.getLogger(SPEAKER).addFilter(Shortened())
