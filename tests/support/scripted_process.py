"""A scripted worker in a process of its own, and the command line over it: no model, no jax.

`python -m jax_specdec.child tests.support.scripted_process` is a worker: it is born, gets commands
and beats as the real one does, and sends into the engine's ring. With `command`, this module runs
`jax-specdec` with such workers: files, signals and the ends of processes are the real ones.
"""

import contextlib
import functools
import os
import subprocess
import sys

import jax_specdec.engine as package
from jax_specdec.cli.main import main as command
from jax_specdec.control import Shutdown
from jax_specdec.engine import engine, worker_ahead
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerProcess
from tests.support.paths import ROOT
from tests.support.scripted_worker import VOCAB, ScriptedWorker

MODULE = (sys.executable, "-m", "tests.support.scripted_process")
WORKER = (sys.executable, "-m", "jax_specdec.child", "tests.support.scripted_process")
HOLD = "SCRIPTED_PROCESS_HOLD"  # messages after which a worker falls silent


def start_command(*arguments, hold=-1, **options):
    """Start `jax-specdec` with `arguments`; its workers fall silent after `hold` messages."""
    command = [*MODULE, str(hold), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, **options)


def settings(**options):
    """The configuration of an engine over scripted workers."""
    return EngineConfig(**{"vocab_size": VOCAB, "num_slots": 3, "max_length": 96} | options)


def scripted_engine(worker=ScriptedWorker, **options):
    """A stand-in for `Engine`, with scripted workers in this process that get `options`."""

    def start(config, *, process_rank, prefill_only, **_):
        return worker(
            config.num_slots,
            process_rank=process_rank,
            prefill_only=prefill_only,
            max_drafts=config.num_drafts,
            **options,
        )

    return engine_with(start)


def engine_with(start):
    """A stand-in for `Engine` whose workers `start` starts, whoever else would."""

    return lambda config, start_worker=None, **options: Engine(
        config, start_worker=start, **options
    )


def main(child, make=ScriptedWorker):
    """Do what the engine commands; after HOLD messages, send no more."""
    hold = int(os.environ.get(HOLD, -1))
    start = child.start
    worker = make(
        start.config.num_slots,
        process_rank=start.process_rank,
        prefill_only=start.prefill_only,
        max_drafts=0,  # the steps of a request are the same in every run
    )
    commands, stats = child.commands, child.stats
    worker.weights_version = start.config.weights_version
    stats.use(worker.weights_version)
    with child.ring as ring:
        stats.be_ready(("scripted",))
        while True:
            while not commands.empty() or not worker.ready() or worker.sent == hold:
                command = commands.get()
                if isinstance(command, Shutdown):
                    return 0
                worker.tell(command)
            message = worker.try_receive()
            if worker.answered != stats.heartbeat.answered:
                stats.answer(worker.answered, worker.refusal)
            if worker.weights_version != stats.heartbeat.weights_version:
                stats.use(worker.weights_version)
            if message:
                stats.advance()
                ring.send(message.data)


def run(hold, *arguments):
    """Run `jax-specdec` with workers that fall silent after `hold` messages. -1: no limit."""
    os.environ[HOLD] = hold
    start = functools.partial(WorkerProcess, program=WORKER)
    package.Engine = engine.Engine = engine_with(start)
    worker_ahead.worker_ahead = contextlib.nullcontext
    return command(arguments)


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
