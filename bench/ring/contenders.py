"""The transports that bench/ring/suite.py compares, behind one small interface.

Each moves one step: token ids, logprobs and token ranks as NumPy arrays, and the time of sending.
`Receiver()` sets the transport up and has an `address`; `Sender(address)` runs in the other
process. A transport that cannot run on this machine raises NotAvailable with the reason.
"""

import ctypes
import functools
import importlib.util
import multiprocessing
import struct
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ipc import RingReader, RingWriter
from ipc.waiting import WaitPolicy
from jax_specdec.control.socket_path import SocketAddress

SLOT_BYTES = 600_000
SLOTS = 16
SEED_BYTES = 530_456  # the seed's fixed struct: mtype, meta[3 + 512], 512 slots of 6 tokens
HEADER = struct.Struct("<QII")  # send time in ns, ids, ranks

Step = tuple[int, np.ndarray, np.ndarray, np.ndarray]


class NotAvailable(Exception):
    """A contender does not run on this machine; the text says why."""


class Receiver(Protocol):
    address: Any

    def receive(self) -> Step: ...

    def close(self) -> None: ...


class Sender(Protocol):
    def __init__(self, address: Any) -> None: ...

    def send(self, time_ns: int, arrays: Sequence[np.ndarray]) -> None: ...

    def close(self) -> None: ...


def parts_of(time_ns: int, arrays: Sequence[np.ndarray]) -> tuple[Any, ...]:
    """The step as buffers, without a copy."""
    return (HEADER.pack(time_ns, len(arrays[0]), len(arrays[2])), *arrays)


def step_of(data: Any) -> Step:
    """Views into one contiguous message."""
    time_ns, n, ranks = HEADER.unpack_from(data)
    ids = np.frombuffer(data, np.int32, n, HEADER.size)
    logprobs = np.frombuffer(data, np.float32, n, HEADER.size + 4 * n)
    return time_ns, ids, logprobs, np.frombuffer(data, np.int32, ranks, HEADER.size + 8 * n)


def step_of_arrays(time_ns: int, ids: Any, logprobs: Any, ranks: Any) -> Step:
    """Views into the message of each array."""
    floats = np.frombuffer(logprobs, np.float32)
    return time_ns, np.frombuffer(ids, np.int32), floats, np.frombuffer(ranks, np.int32)


def fill(view: memoryview, parts: Iterable[Any]) -> None:
    """Copy the parts to the beginning of `view`, one after another."""
    start = 0
    for part in parts:
        flat = memoryview(part).cast("B")
        view[start : start + len(flat)] = flat
        start += len(flat)


class RingReceiver:
    """This project's ring, with its defaults."""

    def __init__(self, wait: WaitPolicy = "predict", checksum: bool = True) -> None:
        self.reader = RingReader.create(SLOTS, SLOT_BYTES, wait=wait, checksum=checksum)
        self.address = (self.reader.name, wait)

    def receive(self) -> Step:
        return step_of(self.reader.receive().data)

    def close(self) -> None:
        self.reader.close()


class RingSender:
    def __init__(self, address: tuple[str, WaitPolicy]) -> None:
        self.writer = RingWriter.attach(address[0], wait=address[1])

    def send(self, time_ns: int, arrays: Sequence[np.ndarray]) -> None:
        self.writer.send(*parts_of(time_ns, arrays))

    def close(self) -> None:
        self.writer.close()


class SysVReceiver:
    """The seed's way: a fixed struct of 530,456 bytes through a SysV message queue."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.msgrcv.restype = ctypes.c_ssize_t
        word, pointer = ctypes.c_int, ctypes.c_void_p
        self.libc.msgrcv.argtypes = (word, pointer, ctypes.c_size_t, ctypes.c_long, word)
        self.limits = {"msgmax": SEED_BYTES, "msgmnb": SLOTS * SEED_BYTES}
        self.before: dict[str, str] = {}
        try:
            for name, needed in self.limits.items():
                path = Path("/proc/sys/kernel", name)
                if int(path.read_text()) < needed:
                    self.before[name] = path.read_text()
                    path.write_text(str(needed))
        except OSError as error:
            self._restore()
            raise NotAvailable(
                f"a {SEED_BYTES}-byte message needs a raised {path}: {error}"
            ) from None
        self.address = self.libc.msgget(0, 0o600 | 0o1000)  # IPC_PRIVATE, IPC_CREAT
        self.buffer = ctypes.create_string_buffer(SEED_BYTES)
        self.view = memoryview(self.buffer).cast("B")[8:]

    def receive(self) -> Step:
        self.libc.msgrcv(self.address, self.buffer, SEED_BYTES - 8, 0, 0)
        return step_of(self.view)

    def close(self) -> None:
        self.libc.msgctl(self.address, 0, None)  # IPC_RMID
        self._restore()

    def _restore(self) -> None:
        for name, value in self.before.items():
            Path("/proc/sys/kernel", name).write_text(value)


class SysVSender:
    def __init__(self, address: int) -> None:
        self.queue = address
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.msgsnd.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.buffer = ctypes.create_string_buffer(SEED_BYTES)
        self.view = memoryview(self.buffer).cast("B")[8:]
        self.buffer[0] = b"\1"  # mtype

    def send(self, time_ns: int, arrays: Sequence[np.ndarray]) -> None:
        fill(self.view, parts_of(time_ns, arrays))
        if self.libc.msgsnd(self.queue, self.buffer, SEED_BYTES - 8, 0) != 0:
            raise OSError(ctypes.get_errno(), "msgsnd")

    def close(self) -> None:
        pass


class ZmqReceiver:
    """ZeroMQ: one frame for each array, copy=False on both sides."""

    def __init__(self) -> None:
        zmq = _module("zmq")
        self.directory = tempfile.TemporaryDirectory()
        self.address = f"ipc://{self.directory.name}/socket"
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.path = SocketAddress(self.address)
        self.socket.bind(self.path.text)

    def receive(self) -> Step:
        head, *arrays = (frame.buffer for frame in self.socket.recv_multipart(copy=False))
        return step_of_arrays(HEADER.unpack(head)[0], *arrays)

    def close(self) -> None:
        self.socket.close()
        self.context.term()
        self.path.close()
        self.directory.cleanup()


class ZmqSender:
    def __init__(self, address: str) -> None:
        zmq = _module("zmq")
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUSH)
        self.path = SocketAddress(address)
        self.socket.connect(self.path.text)

    def send(self, time_ns: int, arrays: Sequence[np.ndarray]) -> None:
        self.socket.send_multipart(parts_of(time_ns, arrays), copy=False)

    def close(self) -> None:
        self.socket.close()
        self.context.term()
        self.path.close()


class MsgpackReceiver(ZmqReceiver):
    """ZeroMQ: one msgpack frame with the arrays' bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.unpack = _module("msgpack").unpackb

    def receive(self) -> Step:
        return step_of_arrays(**self.unpack(self.socket.recv()))


class MsgpackSender(ZmqSender):
    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.pack = _module("msgpack").packb

    def send(self, time_ns: int, arrays: Sequence[np.ndarray]) -> None:
        ids, logprobs, ranks = (array.tobytes() for array in arrays)
        step = {"time_ns": time_ns, "ids": ids, "logprobs": logprobs, "ranks": ranks}
        self.socket.send(self.pack(step))


class QueueReceiver:
    """multiprocessing.Queue: pickle through a pipe."""

    def __init__(self) -> None:
        self.address = multiprocessing.get_context("spawn").Queue()

    def receive(self) -> Step:
        step: Step = self.address.get()
        return step

    def close(self) -> None:
        self.address.close()


class QueueSender:
    def __init__(self, address: Any) -> None:
        self.queue = address

    def send(self, time_ns: int, arrays: Sequence[np.ndarray]) -> None:
        self.queue.put((time_ns, *arrays))

    def close(self) -> None:
        self.queue.close()
        self.queue.join_thread()


class IceoryxReceiver:
    """iceoryx2's Python package, spinning. It blocks when full; its default drops messages."""

    def __init__(self) -> None:
        self.address = f"jax-specdec-bench-{id(self)}-{multiprocessing.current_process().pid}"
        self.iox, self.node, self.service = _iceoryx(self.address)
        self.port = self.service.subscriber_builder().buffer_size(SLOTS).create()

    def receive(self) -> Step:
        while (sample := self.port.receive()) is None:
            pass
        data = bytes(sample.payload().as_memory_view())
        sample.delete()
        return step_of(data)

    def close(self) -> None:
        self.port.delete()
        del self.service, self.node  # the node's files go with the last reference


class IceoryxSender:
    def __init__(self, address: str) -> None:
        self.iox, self.node, self.service = _iceoryx(address)
        self.port = (
            self.service.publisher_builder()
            .initial_max_slice_len(SLOT_BYTES)
            .backpressure_strategy(self.iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )

    def send(self, time_ns: int, arrays: Sequence[np.ndarray]) -> None:
        parts = parts_of(time_ns, arrays)
        size = sum(memoryview(part).nbytes for part in parts)
        sample = self.port.loan_slice_uninit(size)
        fill(sample.payload().as_memory_view().cast("B"), parts)
        sample.assume_init().send()

    def close(self) -> None:
        self.port.delete()
        del self.service, self.node  # the node's files go with the last reference


def _iceoryx(name: str) -> tuple[Any, Any, Any]:
    iox = _module("iceoryx2")
    iox.set_log_level(iox.LogLevel.Error)
    node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
    service = (
        node.service_builder(iox.ServiceName.new(name))
        .publish_subscribe(iox.Slice[ctypes.c_uint8])
        .enable_safe_overflow(False)
        .subscriber_max_buffer_size(SLOTS)
        .open_or_create()
    )
    return iox, node, service


def _module(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise NotAvailable(f"{name} is not installed")
    return importlib.import_module(name)


CONTENDERS: dict[str, tuple[Callable[[], Receiver], type[Sender]]] = {
    "ring": (RingReceiver, RingSender),
    "ring, block": (functools.partial(RingReceiver, "block"), RingSender),
    "ring, spin": (functools.partial(RingReceiver, "spin"), RingSender),
    # Without XXH3-64 over payloads, which both sides compute by default.
    "ring, no checksum": (functools.partial(RingReceiver, checksum=False), RingSender),
    "SysV fixed struct": (SysVReceiver, SysVSender),
    "ZeroMQ msgpack": (MsgpackReceiver, MsgpackSender),
    "ZeroMQ copy=False": (ZmqReceiver, ZmqSender),
    "multiprocessing.Queue": (QueueReceiver, QueueSender),
    "iceoryx2, spin": (IceoryxReceiver, IceoryxSender),
}
BOUND = "C, spin + 2 memcpy"
