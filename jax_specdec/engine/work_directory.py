"""The directory of an engine's workers: the control socket, their output."""

import contextlib
import shutil
from pathlib import Path

from jax_specdec.control import ControlServer


class WorkDirectory:
    """Made with the first worker, removed with the last.

    What a lost worker has printed is kept: an error names the file.
    """

    def __init__(self, address: str = "", output: str = "") -> None:
        """Note where things shall be; nothing is made yet.

        Args:
          address: of the control socket; empty for one in the private directory.
          output: a directory for what the workers print; empty for the private one.
        """
        self._address = address
        self._output = Path(output) if output else None
        self._folder: Path | None = None
        self._server: ControlServer | None = None
        self._numbers: dict[int, int] = {}  # workers so far, by process rank
        self._made: list[Path] = []
        self._kept: set[Path] = set()

    @property
    def folder(self) -> Path:
        """A directory that only this user may enter (mode 0700)."""
        if self._folder is None:
            # Milliseconds, which only an engine that starts workers needs.
            import tempfile

            from jax_specdec.engine import leftovers

            self._folder = Path(tempfile.mkdtemp(prefix=leftovers.DIRECTORY_PREFIX))
            leftovers.mark_owner(self._folder)
        return self._folder

    @property
    def server(self) -> ControlServer:
        """The control plane's end here."""
        if self._server is None:
            self._server = ControlServer(self._address, folder=self.folder)
        return self._server

    @property
    def listens(self) -> bool:
        """Whether there is a socket that heartbeats can come to."""
        return self._server is not None

    def output_file(self, process_rank: int) -> Path:
        """A new file for what the next worker of this place prints."""
        number = self._numbers[process_rank] = self._numbers.get(process_rank, 0) + 1
        folder = self._output or self.folder
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"worker-{process_rank}-{number}.log"
        self._made.append(path)
        return path

    def weights_file(self, number: int) -> Path:
        """Where the arrays of an update are written, without a suffix."""
        return self.folder / f"weights-{number}"

    def keep(self, path: Path) -> None:
        """Leave a worker's output where it is when the rest is removed."""
        self._kept.add(path)

    def close(self) -> None:
        """Close the socket and remove the directory, except for what is kept."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        folder, self._folder = self._folder, None
        if folder is None:
            return
        if any(path.parent == folder for path in self._kept):
            from jax_specdec.engine.leftovers import OWNER

            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path not in self._kept and path.name != OWNER:
                    with contextlib.suppress(OSError):
                        path.unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)
