"""A scripted worker in a process of its own, and the command line over it: no model, no jax.

`python -m tests.support.scripted_process worker` speaks `control` on standard input and sends into
the engine's ring, as the real worker does. With `command`, it runs `jax-specdec` with such workers:
files, signals and the ends of processes are the real ones.
"""

import functools
import queue
import subprocess
import sys
import threading

from ipc import RingWriter
from jax_specdec.cli.main import main as jax_specdec
from jax_specdec.control import Shutdown, Start, from_line
from jax_specdec.engine import engine
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerProcess
from tests.support.paths import ROOT
from tests.support.scripted_worker import ScriptedWorker

MODULE = (sys.executable, "-m", "tests.support.scripted_process")


def start_command(*arguments, hold=-1, **options):
    """Start `jax-specdec` with `arguments`; its workers fall silent after `hold` messages."""
    command = [*MODULE, "command", str(hold), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def scripted_engine(**options):
    """A stand-in for `Engine`, with scripted workers in this process that get `options`."""

    def start(config, *, process_rank, prefill_only, doorbell):
        return ScriptedWorker(
            config.num_slots,
            process_rank=process_rank,
            prefill_only=prefill_only,
            max_drafts=config.num_drafts,
            **options,
        )

    return functools.partial(Engine, start_worker=start)


def read_commands(commands):
    """Parse standard input; its end means that the engine is gone."""
    for line in sys.stdin:
        commands.put(from_line(line))
    commands.put(Shutdown())


def work(hold):
    """Do what the engine commands; after `hold` messages, send no more. -1: no limit."""
    start = from_line(sys.stdin.readline())
    assert isinstance(start, Start)
    worker = ScriptedWorker(
        start.config.num_slots,
        process_rank=start.process_rank,
        prefill_only=start.prefill_only,
        max_drafts=0,  # the steps of a request are the same in every run
    )
    commands = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(commands,), daemon=True).start()
    with RingWriter.attach(start.ring) as ring:
        while True:
            while not commands.empty() or not worker.ready() or worker.sent == hold:
                command = commands.get()
                if isinstance(command, Shutdown):
                    return
                worker.tell(command)
            if message := worker.try_receive():
                ring.send(message.data)


def main(job, hold, *arguments):
    if job == "worker":
        return work(int(hold))
    program = (*MODULE, "worker", hold)
    start = functools.partial(WorkerProcess, program=program)
    engine.Engine = functools.partial(Engine, start_worker=start)
    return jax_specdec(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
