"""The model worker's process: commands come on standard input, messages go into the ring."""

import queue
import sys
import threading
from collections.abc import Callable, Iterable

import jax

from ipc import RingWriter
from jax_specdec.control import Advance, Command, Shutdown, Start, from_line
from jax_specdec.device.drafting.by_name import make_drafter
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.params import ModelParams
from jax_specdec.device.model.sharding import tensor_parallel
from jax_specdec.device.worker.process_group import Lead
from jax_specdec.device.worker.worker import Sender, Worker
from jax_specdec.text.tokenizer import text_encoder


def serve(
    worker: Worker,
    commands: "queue.SimpleQueue[Command]",
    tell: Callable[[Command], None] = lambda _: None,
) -> None:
    """Decode until told to stop: take the commands that wait, advance, block only when idle.

    Args:
      worker: carries the commands out.
      commands: from the engine.
      tell: gets every command just before the worker does.
    """
    while True:
        waits = not (commands.empty() and worker.busy)
        command = commands.get() if waits else Advance()
        tell(command)
        if not worker.apply(command):
            return


def read_commands(lines: Iterable[str], commands: "queue.SimpleQueue[Command]") -> None:
    """Parse lines until they end, which means that the engine is gone: then shut down."""
    try:
        for line in lines:
            commands.put(from_line(line))
    finally:
        commands.put(Shutdown())


def make_worker(start: Start, sender: Sender, *, publish: bool = True) -> Worker:
    """Load the model and make its worker, with empty slots.

    An error that the user can mend ends the process, with the reason on stderr: the engine shows
    it.
    """
    try:
        params, loop = _load(start)
    except (OSError, ValueError, MemoryError) as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    return Worker(
        loop,
        params,
        sender,
        prefill_chunk=start.config.prefill_chunk,
        prefix_reuse=start.config.prefix_reuse,
        process_rank=start.process_rank,
        publish=publish,
    )


def _load(start: Start) -> tuple[ModelParams, LoopConfig]:
    """The weights and the loop that a worker was told to run."""
    config = start.config
    params, model = load_model(
        config.weights,
        dtype=config.dtype,
        num_slots=config.num_slots,
        max_length=config.max_length,
    )
    if config.vocab_size > model.vocab_size:
        raise ValueError(
            f"EngineConfig.vocab_size = {config.vocab_size}, but the model has "
            f"{model.vocab_size} tokens: set it to {model.vocab_size} or less, or prompts "
            "may hold ids that the model does not know"
        )
    parallel = tensor_parallel(model, config.tensor_parallel)
    drafter = make_drafter(
        config.drafter,
        config.num_drafts,
        model,
        corpus=config.corpus,
        adaptive=config.adaptive,
        encode=text_encoder(config.weights, model.vocab_size) if config.corpus else None,
        parallel=parallel,
    )
    return params, LoopConfig(
        model=model,
        drafter=drafter,
        num_slots=config.num_slots,
        max_length=config.max_length,
        prefill_only=start.prefill_only,
        parallel=parallel,
    )


def main() -> int:
    """Entry point of the worker process: commands on stdin, messages into the ring."""
    start = from_line(sys.stdin.readline())
    if not isinstance(start, Start):
        print(f"the first command must be Start, not {type(start).__name__}", file=sys.stderr)
        return 2
    devices = start.config.tensor_parallel
    if start.config.num_processes == 1 and devices > 1:
        # Before JAX looks for devices. The number of accelerators is given.
        jax.config.update("jax_num_cpu_devices", devices)  # type: ignore[no-untyped-call]
    with RingWriter.attach(start.ring) as ring, Lead(start, ring) as lead:
        worker = make_worker(start, lead)
        commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        threading.Thread(target=read_commands, args=(sys.stdin, commands), daemon=True).start()
        serve(worker, commands, lead.tell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
