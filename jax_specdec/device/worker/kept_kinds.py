"""Compiled programs of a kind, kept from one start to the next: nothing is traced for them.

jax's own cache keeps what its compiler made of a program; to find it, a start traces and lowers the
program again, in the interpreter, which takes longer than to read it. Here the executables of a
kind are one file, found by all that its programs follow from: the sources of this library, jax and
its settings, the machine, the loop, the shapes of its arguments, and the kind.

What is kept was compiled anew: XLA's CPU executables that were read cannot be written again, they
lack functions. So jax's own cache is not given these programs.

Only on CPUs, where it was tried, and not for models and functions of the user's own, whose sources
nobody knows.

https://docs.jax.dev/en/latest/jax.experimental.serialize_executable.html
"""

import contextlib
import functools
import hashlib
import math
import os
import pickle
import platform
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled as Stage
from jax.stages import Lowered
from jaxlib.version import __version__ as jaxlib_version

from jax_specdec import compiled_programs
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.loop.kinds import PromptKind, StepKind
from jax_specdec.device.loop.programs import STATIC, Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.worker.compilations import COMPILED, KEPT, READ

AnyKind = StepKind | PromptKind | None  # None: what all kinds share
PACKAGES = "ipc", "jax_specdec", "pallas_kernels"


class Executable:
    """A compiled program, called as the function that it was made of."""

    __slots__ = ("stage",)

    def __init__(self, stage: Stage) -> None:
        """The executable; its static arguments are in it."""
        self.stage = stage

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Run it; static arguments are left out."""
        return self.stage(
            *arguments, **{name: value for name, value in options.items() if name not in STATIC}
        )


class Anew(NamedTuple):
    """A program that was compiled here.

    Attributes:
      stage: the executable.
      is_new: whether the compiler made it now; False: perhaps jax has read it from its cache.
    """

    stage: Stage
    is_new: bool


class KeptKinds:
    """Where the programs of a loop are kept. Kinds that share a program share its executable.

    Attributes:
      folder: `compiled_programs` says which.
      digest: of all that programs follow from, but for their kind.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        """A place; arguments as the attributes."""
        self.folder, self.digest = folder, digest
        self._lock = threading.Lock()
        self._read: dict[str, Future[Stage]] = {}  # by the digest of what was written
        self._written: dict[int, tuple[Stage, Any]] = {}  # by the id of the executable

    @classmethod
    def of(
        cls, folder: Path | None, programs: Compiled, arguments: Any, prefill_chunk: int
    ) -> "KeptKinds | None":
        """The place of these programs; None where they are not kept.

        Args:
          folder: of compiled programs; None: nothing is kept.
          programs: of the loop.
          arguments: what they are called with, abstract.
          prefill_chunk: positions of a chunk of a prompt.
        """
        if folder is None or not _can_be_kept(programs):
            return None
        described = [sources_digest(), *_environment(), repr(programs.config), repr(prefill_chunk)]
        leaves, tree = jax.tree.flatten(arguments)
        described += [str(tree), *(f"{x!r} {getattr(x, 'weak_type', None)}" for x in leaves)]
        return cls(folder, _digest("\n".join(described).encode()))

    def path(self, kind: AnyKind) -> Path:
        """The file of a kind's programs."""
        name = _digest(f"{self.digest} {kind!r}".encode())
        return self.folder / f"kind_{name}{compiled_programs.SUFFIX}"

    def has(self, kind: AnyKind) -> bool:
        """Whether there is a file of the kind."""
        return self.path(kind).is_file()

    def load(self, kind: AnyKind) -> dict[str, Stage] | None:
        """The programs of a kind, by name; None where they are not there, or cannot be read."""
        # What a file holds that another release of a library wrote is anybody's guess: then these
        # programs are compiled, and written anew.
        with contextlib.suppress(Exception):
            stored = pickle.loads(zlib.decompress(self.path(kind).read_bytes()))
            stages = {name: self._executable(program) for name, program in stored.items()}
            for _ in stages:
                jax.monitoring.record_event(READ)
            return stages
        return None

    def _executable(self, program: tuple[bytes, Any, Any]) -> Stage:
        """The executable of what was written; the same one for the same bytes."""
        data, in_tree, out_tree = program
        digest = _digest(data)
        with self._lock:
            begun = digest in self._read
            future = self._read.setdefault(digest, Future())
        if not begun:
            device = jax.config.values["jax_default_device"] or jax.devices()[0]
            try:
                stage = serialize_executable.deserialize_and_load(
                    data, in_tree, out_tree, execution_devices=[device]
                )
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(stage)
        return future.result()

    def _bytes_of(self, stage: Stage) -> Any:
        """The bytes of an executable that are written."""
        with self._lock:
            if id(stage) not in self._written:
                self._written[id(stage)] = stage, serialize_executable.serialize(stage)
            return self._written[id(stage)][1]

    def save(self, kind: AnyKind, programs: Mapping[str, Anew]) -> None:
        """Keep the programs of a kind; where that is impossible, the next start compiles them."""
        if not all(program.is_new for program in programs.values()):
            return
        with contextlib.suppress(OSError, ValueError, jax.errors.JaxRuntimeError):
            stored = {name: self._bytes_of(program.stage) for name, program in programs.items()}
            # One that a process was killed over is a broken program, which a later start removes.
            with tempfile.NamedTemporaryFile(
                dir=self.folder, prefix="writing_", suffix=compiled_programs.SUFFIX, delete=False
            ) as file:
                try:
                    file.write(zlib.compress(pickle.dumps(stored), 1))
                    file.flush()
                    os.replace(file.name, self.path(kind))  # whole, or not at all
                except BaseException:
                    os.unlink(file.name)
                    raise


def compiled_anew(lowered: Lowered) -> Anew:
    """Compile a program in this thread; jax may have it already, from wherever."""
    thread, events = threading.get_ident(), set()

    def heard(event: str, *_: Any, **more: Any) -> None:
        if threading.get_ident() == thread:
            events.add(event)

    jax.monitoring.register_event_listener(heard)
    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        return Anew(lowered.compile(), COMPILED in events and KEPT not in events)
    finally:
        jax.monitoring.unregister_event_listener(heard)
        jax.monitoring.unregister_event_duration_listener(heard)


@contextlib.contextmanager
def not_kept_twice() -> Iterator[None]:
    """In the block jax's own cache is given no program."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.values[name]
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def _can_be_kept(programs: Compiled) -> bool:
    config: LoopConfig = programs.config
    return (
        jax.default_backend() == "cpu"
        and config.parallel.mesh is None
        and isinstance(config.model, ModelConfig)
        and config.accept is None
        and not programs.cuts
        and " at 0x" not in repr(config)  # a part that its words do not describe
    )


@functools.cache
def sources_digest() -> str:
    """A digest of this library's sources."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        module = sys.modules.get(package) or __import__(package)
        for folder in sorted(module.__path__):
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(str(path.relative_to(folder)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _environment() -> list[str]:
    """The facts that programs follow from beside their sources and shapes."""
    devices = jax.devices()
    settings = {
        name: value
        for name, value in sorted(jax.config.values.items())
        if "cache" not in name and "explain" not in name
    }
    return [
        f"{platform.python_version()} {jax.__version__} {jaxlib_version}",
        f"{devices[0].client.platform_version} {devices} {compiled_programs.machine()}",
        f"{len(os.sched_getaffinity(0))} cores",  # among which a program is split
        f"{os.environ.get('XLA_FLAGS', '')} {settings}",
    ]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
