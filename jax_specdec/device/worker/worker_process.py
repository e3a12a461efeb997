"""The model worker's process: commands come over the control plane, messages go into the ring."""

import contextlib
import functools
import gc
import importlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jax_specdec import compiled_programs
from jax_specdec.checkpoint.gguf_file import is_gguf
from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import ModelConfig, cache_bytes
from jax_specdec.child import Child
from jax_specdec.control import (
    Advance,
    Command,
    Commit,
    Phase,
    Prepare,
    ProcessStats,
    Start,
    WorkerConfig,
)
from jax_specdec.declaration import Serves
from jax_specdec.device.drafting.by_name import make_drafter
from jax_specdec.device.loop.kinds import PromptKind, StepKind
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.other_weights import other_weights, own_weights
from jax_specdec.device.model.own_model import Model, OwnModel, in_tiles, row_tile
from jax_specdec.device.model.params import init_params
from jax_specdec.device.model.row_bits import with_bits_of_their_own
from jax_specdec.device.model.sharding import ONE_DEVICE, tensor_parallel
from jax_specdec.device.worker import compilation_cache, compilations, plugin_messages
from jax_specdec.device.worker.kept_kinds import KeptKinds
from jax_specdec.device.worker.prepared import (
    Arguments,
    CannotCompile,
    compile_ladder,
    compile_one,
)
from jax_specdec.device.worker.process_group import Lead
from jax_specdec.device.worker.worker import Sender, Worker
from jax_specdec.structured.vocabulary import read_vocabulary

SHORT_SECONDS = 2.0  # of a run in which tracing more programs would take longer than they save


def serve(
    worker: Worker,
    commands: "queue.SimpleQueue[Command]",
    tell: Callable[[Command], None] = lambda _: None,
    stats: ProcessStats | None = None,
    refusal: Callable[[int], str] = lambda number: "",
) -> None:
    """Decode until told to stop: take the commands that wait, advance, block only when idle.

    Args:
      worker: carries the commands out.
      commands: from the engine.
      tell: gets every command just before the worker does.
      stats: told of every step, when there is nothing to do, and what became of other weights.
      refusal: waits for what the worker's followers have to say against the weights of an update.
    """
    stats = stats or ProcessStats()
    stats.use(worker.weights_version)
    while True:
        if commands.empty() and worker.busy:
            stats.advance()
            command: Command = Advance()
        else:
            if not worker.busy:
                if worker.num_held:  # all requests wait for theirs
                    stats.enter(Phase.COMPILING, what="grammars")
                else:
                    stats.enter(Phase.IDLE)
            command = commands.get()
        tell(command)
        if not worker.apply(command):
            return
        if isinstance(command, Prepare):
            refusals = worker.next_weights.refusal, refusal(command.number)
            stats.answer(command.number, next(filter(None, refusals), ""))
        elif isinstance(command, Commit):
            stats.use(worker.weights_version)


def make_worker(
    start: Start,
    sender: Sender,
    *,
    stats: ProcessStats | None = None,
    publish: bool = True,
    wake: Callable[[], object] | None = None,
    prepare: Callable[[Worker], object] = lambda worker: None,
) -> Worker:
    """Load the model and make its worker, with empty slots; `stats` is told of each tensor.

    With `wake`, which says to the worker when one is done, grammars are compiled in the background
    of its steps. `prepare` gets the worker before it is returned: where the weights' shapes are
    known, while they are read.

    An error that the user can mend ends the process, with the reason on stderr: the engine shows
    it.
    """
    try:
        params, loop, load = _load(start, stats or ProcessStats())
        config = start.config
        worker = Worker(
            loop,
            params,
            sender,
            prefill_chunk=config.prefill_chunk,
            prefix_reuse=config.prefix_reuse,
            process_rank=start.process_rank,
            publish=publish,
            serves=config.serves,
            # A lead's followers would not know its times.
            adaptive=config.draft_width == "adaptive" and config.num_processes == 1,
            wake=wake,
            note=stats.note if stats is not None else lambda text: None,
            weights_version=config.weights_version,
            load=load,
            vocabulary=functools.partial(read_vocabulary, config.texts, loop.model.vocab_size),
        )
        if isinstance(jax.tree.leaves(params)[0], jax.Array):
            prepare(worker)
            return worker
        with ThreadPoolExecutor(1, "preparing") as pool:
            begun: list[Future[object]] = []

            def tell(done: int, total: int) -> None:
                if not begun:  # what can be refused was looked at
                    begun.append(pool.submit(prepare, worker))

            params, _ = load_model(
                config.weights,
                dtype=config.dtype,
                num_slots=config.num_slots,
                max_length=config.max_length,
                tell=tell,
            )
            worker.params = worker.placed(params)
            begun[0].result()
        return worker
    except (OSError, ValueError, MemoryError, CannotCompile) as error:
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def compile_served(
    worker: Worker, stats: ProcessStats, kinds: Callable[[Worker], Sequence[StepKind | PromptKind]]
) -> None:
    """Compile what a worker serves, or some kinds of it.

    Raises:
      CannotCompile: names what cannot be compiled.
    """

    def tell(done: int, total: int, name: str) -> None:
        stats.enter(Phase.COMPILING, done, total, name)

    arguments = Arguments.of(worker.params, worker.state)
    kept = _kept_kinds(worker, arguments)
    ahead = compile_ladder(
        worker.compiled, kinds(worker), arguments, worker.prefill_chunk, tell, kept
    )
    if kept is not None:
        worker.run_ahead(ahead)


def kinds_before_ready(
    config: WorkerConfig, resumes: Serves | None, worker: Worker
) -> tuple[StepKind | PromptKind, ...]:
    """The kinds of programs that are there when a worker says that it is ready: those it serves.

    Whoever takes the place of a lost worker goes on with the requests that wait, as soon as there
    is what they need; whoever starts soon begins with steps of the full width.
    """
    if resumes is not None:
        return worker.kinds_for(resumes)
    return _served_kinds(worker, narrower=not config.starts_soon)


def _served_kinds(worker: Worker, *, narrower: bool) -> tuple[StepKind | PromptKind, ...]:
    """Those of steps, with fewer drafts too if `narrower`, and that of prompts."""
    assert worker.ladder is not None
    kinds, prompt = worker.kinds(narrower=narrower), worker.ladder.prompt
    return kinds if prompt is None else (*kinds, prompt)


def _kept_kinds(worker: Worker, arguments: Arguments) -> KeptKinds | None:
    """The programs of a worker that earlier starts have kept."""
    folder = compilation_cache.folder()
    return KeptKinds.of(folder, worker.compiled, arguments, worker.prefill_chunk)


def rehearse(worker: Worker, config: WorkerConfig, stats: ProcessStats) -> None:
    """Run what a worker serves once: no first request waits for anything that a second does not.

    The processes of a group compile what they run here, so they do it in the same order.
    """
    if not config.starts_soon:
        worker.rehearse(worker.kinds(), lambda name: stats.enter(Phase.COMPILING, what=name))


def compile_beside(
    worker: Worker, before: Collection[StepKind | PromptKind], seconds: float = 0.0
) -> threading.Thread:
    """A thread that compiles what a worker serves and what is not there yet, beside its steps.

    It lets `seconds` go by first: a run that ends before needs none of it.

    Args:
      worker: waits where it needs a kind that is not there yet; steps that verify fewer drafts are
        made once they can be.
      before: the kinds that are there.
      seconds: until it begins.
    """
    kinds = (*_served_kinds(worker, narrower=False), *worker.kinds())
    arguments = Arguments.of(worker.params, worker.state)
    kept = _kept_kinds(worker, arguments)
    worker.coming = coming = {kind: Future[None]() for kind in kinds if kind not in before}

    def compile_all() -> None:
        begun: dict[int, Any] = {}
        for kind, compiled in coming.items():
            try:
                stages = compile_one(worker.compiled, kind, arguments, kept, begun)
            except Exception as error:
                compiled.set_exception(CannotCompile(f"{kind}: {error}"))
            else:
                if kept is not None:
                    worker.run_ahead({kind: stages})
                compiled.set_result(None)

    thread = threading.Timer(seconds, compile_all)
    thread.name, thread.daemon = "compiling", True
    return thread


@contextlib.contextmanager
def ending_at_once(threads: Sequence[threading.Thread]) -> Iterator[None]:
    """End the process behind the block, if one of these still runs.

    A compiler cannot be told to stop, and its threads do not outlive the interpreter.
    """
    status = 0
    try:
        yield
    except BaseException as error:
        if not any(thread.is_alive() for thread in threads):
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        status = 1
    if any(thread.is_alive() for thread in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def reads_while_it_prepares(config: WorkerConfig) -> bool:
    """Whether the weights' shapes tell all that programs depend on: those of one checkpoint."""
    alone = config.tensor_parallel == 1 and not (config.own_model or config.draft_model)
    checkpoint = Path(config.weights).is_dir() or is_gguf(config.weights)
    return bool(config.weights) and alone and checkpoint and config.num_processes == 1


def own_devices(start: Start) -> list[jax.Device]:
    """The devices that this process may use, in order."""
    devices = jax.local_devices()
    return [devices[place] for place in start.local_devices] or devices


def _load(start: Start, stats: ProcessStats) -> tuple[Any, LoopConfig, Callable[[str, Any], Any]]:
    """The weights and the loop that a worker was told to run, and a reader of other weights.

    Of weights that are read while programs are compiled, there are the shapes.
    """
    config = start.config
    devices = own_devices(start) if start.local_devices else None
    load = functools.partial(
        load_model,
        num_slots=config.num_slots,
        max_length=config.max_length,
        tell=stats.load,
        num_devices=config.tensor_parallel,
        devices=devices,
    )
    params: Any
    model: Model
    if config.own_model:
        params, model = _own_model(config)
        other: Callable[[str, Any], Any] = own_weights
        if config.weights:
            params = own_weights(config.weights, params)
    else:
        if reads_while_it_prepares(config):
            model = sizes = open_model(config.weights, dtype=config.dtype).config
            params = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))
        else:
            params, model = load(config.weights, dtype=config.dtype)
        other = functools.partial(
            other_weights, config=model, tell=stats.load, num_devices=config.tensor_parallel,
            devices=devices,
        )  # fmt: skip
    small = None
    if config.draft_model and isinstance(model, ModelConfig):
        of_target = cache_bytes(model, config.num_slots, config.max_length, config.tensor_parallel)
        draft, small = load(config.draft_model, dtype=model.dtype, reserved=of_target)
        params = replace(params, draft=draft)
    if config.vocab_size > model.vocab_size:
        raise ValueError(
            f"EngineConfig.vocab_size = {config.vocab_size}, but the model has "
            f"{model.vocab_size} tokens: set it to {model.vocab_size} or less, or prompts "
            "may hold ids that the model does not know"
        )
    parallel = ONE_DEVICE
    if isinstance(model, ModelConfig):
        parallel = tensor_parallel(model, config.tensor_parallel, devices)
    drafter = make_drafter(
        config.drafter,
        config.num_drafts,
        model,
        parallel=parallel,
        draft_model=small,
    )
    if config.batch_invariant:
        model = _in_tiles(model, config)
        # Several processes' arrays cannot be looked at from one of them.
        if config.num_processes == 1:
            width, tiles = 1 + config.num_drafts, model
            model = with_bits_of_their_own(
                params, model, config.num_slots, width, config.max_length
            )
            if model != tiles:
                print(
                    f"batch_invariant: products of fewer rows have other bits on this "
                    f"{jax.devices()[0].device_kind}, so all have row_tile = {config.row_tile}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    loop = LoopConfig(
        model=model,
        drafter=drafter,
        num_slots=config.num_slots,
        max_length=config.max_length,
        prefill_only=start.prefill_only,
        parallel=parallel,
        implementation=config.implementation or None,
    )
    return params, loop, other


def _in_tiles(model: Model, config: WorkerConfig) -> Model:
    """The model with products of so many rows.

    Raises:
      ValueError: it is of the user's own, and has no tiles.
    """
    if isinstance(model, ModelConfig):
        return in_tiles(model, config.row_tile)
    if row_tile(model) is None:
        raise ValueError(
            f"batch_invariant = True, but {type(model).__name__} has no row_tile: compute its rows "
            "by `over_rows` in tiles, and say of how many rows, or leave batch_invariant out"
        )
    return model


def _own_model(config: WorkerConfig) -> tuple[Any, OwnModel]:
    """The model that the user's function makes of this configuration.

    Raises:
      ValueError: there is no such module or function, or it returns something else.
    """
    module, _, name = config.own_model.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"own_model {config.own_model!r} cannot be found: {error}; install the module, or name "
            "its folder in PYTHONPATH"
        ) from error
    made = make(config)
    if not (isinstance(made, tuple) and len(made) == 2 and hasattr(made[1], "forward")):
        raise ValueError(f"own_model {config.own_model!r} returned no (params, OwnModel): {made!r}")
    params, model = made
    return params, model


def leave_debug_modes() -> None:
    """End the debug modes of jax's environment that cannot mean a worker, and say so in its log.

    Infinities are values here (a q without a further token, a cut that keeps everything), and what
    a worker sends to its device is sent on purpose.
    """
    guards = ("", "_host_to_device", "_device_to_host", "_device_to_device")
    allowed: dict[str, Any] = {f"jax_transfer_guard{guard}": "allow" for guard in guards}
    for name, value in (allowed | {"jax_debug_infs": False}).items():
        if getattr(jax.config, name) not in (value, "log", None):
            print(f"{name.upper()} has no effect in a worker", file=sys.stderr, flush=True)
            jax.config.update(name, value)


def main(child: Child) -> int:
    """Entry point of the worker process, once its heartbeats have begun."""
    plugin_messages.shorten()
    leave_debug_modes()
    start, stats = child.start, child.stats
    gc.disable()  # tracing makes millions of objects that stay
    config = start.config
    devices = config.tensor_parallel
    if config.num_processes == 1:
        if start.local_devices:
            jax.config.update("jax_default_device", own_devices(start)[0])
        elif devices > 1:
            # Before JAX looks for devices. The number of accelerators is given.
            jax.config.update("jax_num_cpu_devices", devices)
    compilation_cache.keep_programs(config.compilation_cache)
    compiled = compilations.watch(stats)
    assert child.ring is not None

    def wake() -> None:
        child.commands.put(Advance())

    beside: list[threading.Thread] = []
    with ending_at_once(beside), child.ring as ring, Lead(start, ring, child.client) as lead:
        began = time.monotonic()
        stats.enter(Phase.LOADING)
        alone = config.num_processes == 1
        # Where programs are kept, those of a lost worker are there: nobody waits for a compiler.
        has_kept = alone and config.compilation_cache != compiled_programs.OFF
        resumes = start.resumes if has_kept else None
        before_ready = functools.partial(kinds_before_ready, config, resumes)
        served = functools.partial(compile_served, stats=stats, kinds=before_ready)
        worker = make_worker(
            start,
            lead,
            stats=stats,
            wake=wake if alone else None,
            prepare=served if alone else lambda worker: None,
        )
        if resumes is None:
            rehearse(worker, config, stats)
        stats.note(f"compiled {compiled} in {time.monotonic() - began:.1f} s")
        # What is there stays: a collection of all of it would hold up every request. Nor is there
        # one now: it takes 0.3 s to find a few dozen objects.
        gc.freeze()
        gc.enable()
        stats.be_ready(tuple(map(str, own_devices(start)[:devices])))
        if alone and (config.starts_soon or resumes is not None):
            seconds = SHORT_SECONDS if resumes is None else 0.0
            beside.append(compile_beside(worker, before_ready(worker), seconds))
            beside[0].start()
        serve(worker, child.commands, lead.tell, stats, lead.refusal)
    return 0
