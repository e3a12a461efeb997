"""A server of HTTP over scripted workers, in threads of this process, at a free port."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from socket import SO_SNDBUF, SOL_SOCKET
from types import SimpleNamespace

import httpx

from ipc import RingTimeout
from jax_specdec.engine import EVERYTHING, Engine, EngineConfig
from jax_specdec.export import TokenTable
from jax_specdec.serve.app import Service
from jax_specdec.serve.bounds import Bounds
from jax_specdec.serve.listener import Listener, bound
from jax_specdec.serve.model import ServedModel
from tests.support.processes import wait_for
from tests.support.scripted_worker import VOCAB, ScriptedWorker

EOS = VOCAB - 1
# Tokens of several characters, halves of one, and none that is special but the last.
PIECES = [
    b"a", b"b", b"c", b" ", b"ab", b"bc", b"\xc3", b"\xa9", b"the ", b"\n", b"x", b"yz", b"0", b"1",
    b"--", b".", b"q", b"r", b"s", b"t", b"u", b"v", b"w", b"A", b"B", b"C", b"D", b"E", b"F", b"G",
    b"H", b"",
]  # fmt: skip
until = wait_for
TABLE = TokenTable(PIECES, {EOS: "</s>"})
MAX_LENGTH = 64


class Encoder:
    """Characters to ids; a conversation is its contents."""

    def encode(self, text):
        return tuple(ord(c) % EOS for c in text)

    def encode_chat(self, messages, functions=()):
        if messages[0]["role"] == "system":
            raise ValueError("the chat template refuses these messages: no system message")
        return self.encode("".join(one["content"] for one in messages))


MODEL = ServedModel(
    name="scripted",
    created=1,
    encoder=Encoder(),
    table=TABLE,
    vocab_size=VOCAB,
    max_length=MAX_LENGTH,
    eos_token_ids=(EOS,),
)


class WaitingWorker(ScriptedWorker):
    """A worker whose steps a test allows; the engine waits meanwhile, as for a slow one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.allowed = threading.Semaphore(0)

    def receive(self, timeout):
        if not self.allowed.acquire(timeout=min(timeout, 0.02)):
            raise RingTimeout("no step is allowed")
        return super().receive(timeout)


class StallingWorker(ScriptedWorker):
    """A worker that makes no further step once a request has so many tokens, until that ends."""

    MOST = 30

    def receive(self, timeout):
        long = any(slot and len(slot.ids) - len(slot.prompt) >= self.MOST for slot in self.slots)
        if long and not self.new_commands:
            time.sleep(min(timeout, 0.02))
            raise RingTimeout("it stalls")
        return super().receive(timeout)


@contextlib.contextmanager
def serving(
    *,
    api_key="",
    bounds=None,
    worker=ScriptedWorker,
    model=MODEL,
    send_buffer=None,
    host="127.0.0.1",
    access_log=False,
    **config,
):
    """Serve until the block ends; yields the server's parts, and ways to ask it.

    `http` is a client, `ask(path, headers=..., **body)` posts, and `ask_later` does so in a thread.

    Args:
      send_buffer: bytes that the system takes from the server for a client that does not read.
    """
    workers = []

    def start(config, *, process_rank, **_):
        workers.append(worker(config.num_slots, process_rank=process_rank, draft_messages=True))
        return workers[-1]

    def ask(path="completions", headers=None, **body):
        return http.post(f"/v1/{path}", json=body, headers=headers)

    def ask_later(**body):
        return pool.submit(ask, **body)

    given = {"vocab_size": VOCAB, "max_length": MAX_LENGTH, "num_slots": 4, "serves": EVERYTHING}
    given |= config
    settings = EngineConfig(**given)
    with (
        ThreadPoolExecutor(8) as pool,
        bound(host, 0) as socket,
        Engine(settings, start_worker=start) as engine,
    ):
        if send_buffer is not None:  # connections have that of the socket that listens
            socket.setsockopt(SOL_SOCKET, SO_SNDBUF, send_buffer)
        service = Service(engine, model, bounds=bounds or Bounds(), api_key=api_key,
                          access_log=access_log)  # fmt: skip
        listener = Listener(service)
        thread = threading.Thread(target=listener.run, args=([socket],))
        thread.start()
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{socket.getsockname()[1]}"
        http = httpx.Client(base_url=url, timeout=60)
        try:
            yield SimpleNamespace(
                url=url, engine=engine, service=service, workers=workers, listener=listener,
                thread=thread, http=http, ask=ask, ask_later=ask_later,
            )  # fmt: skip
        finally:
            listener.should_exit = True
            http.close()
            thread.join(30)


def finished(server, reason):
    """How many requests the first worker's processor has seen end for a reason."""
    return server.engine.status[0].processor.finished[reason - 1]
