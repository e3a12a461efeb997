"""Socket files in directories with long paths.

Linux takes at most 107 bytes for the path of a socket (unix(7)), far less than for that of a file:
a directory in a long TMPDIR has no room for one. A process that holds the directory open reaches
the socket as /proc/self/fd/N/name, which is short. The file itself stands where its path says.
"""

import contextlib
import errno
import os
from types import TracebackType
from typing import Self

MAX_BYTES = 107  # of sun_path, without the zero at its end
SCHEME = "ipc://"  # of ZeroMQ's addresses of socket files
UNNAMED = ("*", "@")  # begin what is no path: one that ZeroMQ chooses, and an abstract name


class SocketPath:
    """A socket's path in a form that the system takes in this process.

    Attributes:
      text: the form; it is good until `close`.
    """

    def __init__(self, path: str) -> None:
        """Open the directory, if the path is too long.

        Raises:
          OSError: the directory cannot be opened, or the file's own name is too long.
        """
        self.text = path
        self._directory: int | None = None
        size = len(os.fsencode(path))
        if size <= MAX_BYTES:
            return
        folder, name = os.path.split(path)
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._directory = directory
        self.text = f"/proc/self/fd/{directory}/{name}"
        if (short := len(os.fsencode(self.text))) > MAX_BYTES:
            self.close()
            raise OSError(
                errno.ENAMETOOLONG,
                f"the socket's path has {size} bytes and its shortest form {short}, where Linux "
                f"takes {MAX_BYTES}: give the socket file a shorter name",
                path,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the directory go. Calling it again does nothing."""
        directory, self._directory = self._directory, None
        if directory is not None:
            with contextlib.suppress(OSError):
                os.close(directory)


class SocketAddress(SocketPath):
    """An address of ZeroMQ in such a form; one that is no path of a file stays as it is."""

    def __init__(self, address: str) -> None:
        path = address.removeprefix(SCHEME)
        is_file = path != address and not path.startswith(UNNAMED)
        super().__init__(path if is_file else "")
        self.text = f"{SCHEME}{self.text}" if is_file else address
