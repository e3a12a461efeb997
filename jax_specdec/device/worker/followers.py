"""A lead's followers as it sees them: its own children, or processes that others start for it.

On other nodes a lead can start nothing. Whoever placed the group there listens at a socket file
(`WorkerConfig.group_launcher`, `multiprocessing.connection`): the lead sends the line that the
follower is born with, and at last gets how it ended. The connection ends with either side.
"""

import contextlib
import subprocess
import sys
from multiprocessing.connection import Client

# -P: a file in the current directory must not stand in for a module of the follower.
FOLLOWER = (
    sys.executable, "-P", "-m", "jax_specdec.child", "jax_specdec.device.worker.follower_process"
)  # fmt: skip


class OwnFollower:
    """A child of this process.

    Attributes:
      pid: of its process.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(FOLLOWER, stdin=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def tell(self, line: str) -> None:
        """Say what it is born with."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is noticed by its thread
            self._process.stdin.write(line)  # far less than a pipe holds
            self._process.stdin.flush()  # and stays open: its end is the lead's

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end: its exit status, negative for a signal; None if it did not come."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None


class PlacedFollower:
    """A process on another node, started by who placed the group.

    Attributes:
      why: how it was lost, in words of who placed it; empty until it has ended.
    """

    pid = 0

    def __init__(self, launcher: str) -> None:
        """Connect to the launcher.

        Raises:
          OSError: nobody listens there.
        """
        self._connection = Client(launcher, "AF_UNIX")
        self._code: int | None = None
        self.why = ""

    def tell(self, line: str) -> None:
        self._connection.send_bytes(line.encode())

    def wait(self, timeout: float | None = None) -> int | None:
        if self._code is None and self._connection.poll(timeout):
            try:
                code, _, self.why = self._connection.recv_bytes().decode().partition(" ")
                self._code = int(code)
            except (EOFError, OSError):
                self._code, self.why = 1, "who started it has ended"
        return self._code


FollowerHandle = OwnFollower | PlacedFollower  # one follower of a lead
