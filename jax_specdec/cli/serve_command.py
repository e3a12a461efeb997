"""`jax-specdec serve`: an OpenAI-compatible server with exact logprobs."""

import argparse
import gc
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.hf_names import open_model
from jax_specdec.checkpoint.model_config import ModelConfig, cache_bytes
from jax_specdec.checkpoint.shipped import tiny_config
from jax_specdec.cli import engine_options, room
from jax_specdec.cli.argument_types import integer
from jax_specdec.cli.logs import add_log_level, logged
from jax_specdec.cli.prompts import sampling_params
from jax_specdec.cli.serve_bounds import add_bounds, allow_files, bounds
from jax_specdec.cli.serves_options import add_serves, serves
from jax_specdec.engine import Engine
from jax_specdec.engine.config import EngineConfig
from jax_specdec.requests import RequestError, SamplingParams
from jax_specdec.serve import tools
from jax_specdec.serve.model import TINY, ServedModel, directory_model, tiny_model
from jax_specdec.text import byte_tokens

logger = logging.getLogger("jax_specdec.serve")

HELP = """\
Serve a model over HTTP as OpenAI's API has it: /v1/completions, /v1/chat/completions, /v1/models,
and /health, /metrics, /openapi.json. Without --model, it is the tiny model that comes along. It
listens on this machine only, unless --host says otherwise. SIGTERM and Ctrl-C let open requests
end first. Where no worker may be started again, it ends with status 1.
"""
MAX_LENGTH = 1024  # where neither an option nor a checkpoint says
CACHE_BYTES = 4 << 30  # of all slots, where --max-length is not given; or a quarter of the weights'
KEY_VARIABLE = "JAX_SPECDEC_API_KEY"
_INSTALL = "pip install 'prometheus_client>=0.20' 'pydantic>=2.10' 'starlette>=0.40' 'uvicorn>=0.30' 'llguidance>=1.9'"  # noqa: E501


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", type=Path, metavar="DIR",
        help="a checkpoint in Hugging Face layout, or a GGUF file (default: the tiny "
        "model)")  # fmt: skip
    own_model_group = parser.add_argument_group("a model of your own, instead of --model")
    own_model_group.add_argument("--own-model", default="", metavar="MODULE:FUNCTION",
        help="what makes it in a worker, as EngineConfig.own_model")  # fmt: skip
    own_model_group.add_argument("--tokenizer", type=Path, metavar="DIR",
        help="its tokenizer.json, and perhaps tokenizer_config.json and "
        "generation_config.json")  # fmt: skip
    own_model_group.add_argument("--vocab-size", type=integer(1), metavar="V",
        help="ids that the model knows (default: those of the tokenizer)")  # fmt: skip
    own_model_group.add_argument("--weights", type=Path, metavar="FILE",
        help="a safetensors file of its parameters (default: those that FUNCTION returns)",
    )  # fmt: skip
    parser.add_argument(
        "--name", help="what clients call the model (default: its directory's name)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    parser.add_argument("--port", type=integer(0, 65535), default=8000,
        help="0 for a free one (default: %(default)s)")  # fmt: skip
    parser.add_argument("--api-key", default="", metavar="KEY",
        help="what clients must send as a bearer token (default: the environment's "
        f"{KEY_VARIABLE}, which other users cannot read; else none is asked for)")  # fmt: skip
    add_bounds(parser)
    add_serves(parser).add_argument("--prepare", action="append", type=_params_of, default=[],
        metavar="NAME=VALUE,..",
        help="what a request may ask for too, such as temperature=1,logprobs=50: another way to "
        "write the options above; may be given several times")  # fmt: skip
    engine_options.add_special_tokens(parser)
    running = parser.add_argument_group("running")
    engine_options.add_engine(running)
    engine_options.add_dtype(running)
    running.add_argument("--max-length", type=integer(2), metavar="T",
        help="tokens of a request, prompt included (default: the checkpoint's, or those for which "
        f"the caches of all slots take {CACHE_BYTES >> 30} GiB, or a quarter of the weights' size "
        "if that is more, and at most a quarter of the machine's memory; without a checkpoint "
        f"{MAX_LENGTH})")  # fmt: skip
    running.add_argument("--workers", type=integer(1, 64), default=1, metavar="N",
        help="processes with a model each (default: %(default)s)")  # fmt: skip
    engine_options.add_restarts(running, default=3)
    add_log_level(running)
    running.add_argument("--access-log", action="store_true",
        help="log a line for each answer, at the level info")  # fmt: skip
    engine_options.add_ray(running)
    running.add_argument("--max-replicas", type=integer(1, 2**16), metavar="N",
        help="with --ray: Ray Serve adds replicas up to N while more requests run in each than it "
        "has slots (default: none)")  # fmt: skip
    running.add_argument("--scaling", type=engine_options.numbers, default={}, metavar="NAME=N,..",
        help="with --max-replicas: further settings of Ray Serve's AutoscalingConfig, such as "
        "upscale_delay_s=10,downscale_delay_s=60 (default: Ray's own, 30 and 600)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit status, 0 after draining.

    Raises:
      WorkerFailed: the engine has stopped for good.
      ValueError: an option cannot be used, or a library is missing.
      OSError: a file cannot be read, or the address is taken.
    """
    try:
        from jax_specdec.serve.app import Service
        from jax_specdec.serve.listener import Listener, bound
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("pydantic", "starlette", "uvicorn"):
            raise
        raise ValueError(f"the server needs {error.name}: {_INSTALL}") from error
    from jax_specdec.cli.serve_watch import watched

    limits = bounds(options)
    engine_options.refuse_without_ray(options)
    if options.ray is not None:
        if options.access_log:
            raise ValueError("--access-log is not for --ray, whose proxies log requests themselves")
        from jax_specdec.cli import serve_ray

        with logged(options.log_level):
            say_what_is_missing()
            return serve_ray.run(options, model_of, limits)
    allow_files(limits.max_connections)
    make_model, config, sizes = model_of(options)
    key = options.api_key or os.environ.get(KEY_VARIABLE, "")
    socket = bound(options.host, options.port)
    with logged(options.log_level), socket, Engine(config) as engine:
        say_what_is_missing()
        model = make_model()  # beside the worker, which loads meanwhile
        service = Service(engine, model, bounds=limits, api_key=key, access_log=options.access_log)
        host, port = socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        logger.info(
            "serving %s at http://%s:%d/v1 (pid %d; workers: %d, slots of each: %d)",
            model.name, shown, port, os.getpid(), config.num_ranks, config.num_slots,
        )  # fmt: skip
        logger.info("%s", room.line(config, sizes))
        try:
            model.encoder.prepare()
        except ValueError as error:
            logger.warning("conversations are not served: %s", error)
        engine.serve()  # a worker that is lost before the first request is replaced too
        listener = Listener(service)
        gc.collect()
        gc.freeze()  # what is there stays: a collection of all of it would hold up every stream
        with watched(engine, listener, kept_in=engine_options.kept_in(config.compilation_cache)):
            listener.run(sockets=[socket])
        if (failure := engine.failure) is not None:
            raise failure
        engine.drain(0)
        logger.info("the server has ended")
    return 0


def say_what_is_missing() -> None:
    """Log what the server will answer with errors, as a library is missing."""
    if why := tools.structure_obstacle():
        logger.warning("requests with tools, response_format or structured_outputs fail: %s", why)


def _params_of(text: str) -> SamplingParams:
    """An argparse type: what a request asks for, such as "temperature=1"."""
    if text == "off":
        raise argparse.ArgumentTypeError(
            "nothing is compiled once a server is ready: leave out what nobody asks for by "
            "options such as --no-penalties and --no-grammars"
        )
    fields = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            fields[name.strip()] = json.loads(value)
        except ValueError:
            fields[name.strip()] = value
    try:
        return sampling_params(fields, SamplingParams())
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _fitting_length(config: ModelConfig, options: argparse.Namespace, most: int) -> int:
    """The tokens of a request whose caches are no burden; at least `MAX_LENGTH`, or `most`."""
    most_bytes = max(CACHE_BYTES, config.weight_bytes // 4)
    most_bytes = min(most_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    step = engine_options.LENGTH_STEP
    length: int = most_bytes // cache_bytes(config, options.slots, step) * step
    return min(max(length, MAX_LENGTH), most)


def model_of(
    options: argparse.Namespace,
) -> tuple[Callable[[], ServedModel], EngineConfig, ModelConfig | None]:
    """The maker of the model to serve, the engine that runs it, and its sizes if they are known."""
    weights, dtype, limit, checkpoint = "", options.dtype, MAX_LENGTH, None
    directory, vocab_size, eos = options.tokenizer, options.vocab_size, None
    name = options.own_model.partition(":")[0] or TINY
    if options.own_model:
        if options.model or not options.tokenizer:
            raise ValueError(
                "--own-model stands in place of --model and needs --tokenizer DIR, with the "
                "tokenizer.json by which prompts are read"
            )
        weights = engine_options.existing_path(options.weights)
    elif alone := next((n for n in ("tokenizer", "vocab_size", "weights")
                        if getattr(options, n) is not None), ""):  # fmt: skip
        raise ValueError(f"--{alone.replace('_', '-')} is for --own-model")
    elif options.model is not None:
        directory, name = options.model, options.model.resolve().name
        checkpoint = open_model(directory, dtype=dtype)
        vocab_size, eos = checkpoint.config.vocab_size, checkpoint.hf.eos_token_ids
        most = checkpoint.hf.max_length or 2**31 - 1
        limit = _fitting_length(checkpoint.config, options, most)
        if (options.max_length or 0) > most:
            raise ValueError(
                f"--max-length {options.max_length} is more than the {most} positions that the "
                "model was made for"
            )
        weights, dtype = str(directory.resolve()), checkpoint.config.dtype
    length = options.max_length or limit
    options_of_model: dict[str, Any] = {
        "name": options.name or name, "created": int(time.time()), "max_length": length,
    }  # fmt: skip
    make: Callable[[], ServedModel]
    if directory is None:
        make, vocab_size = partial(tiny_model, **options_of_model), byte_tokens.VOCAB_SIZE
    else:
        make = partial(
            directory_model, directory, vocab_size=vocab_size, eos=eos,
            special_in_messages=options.special_tokens_in_messages, **options_of_model,
        )  # fmt: skip
        if vocab_size is None:  # the tokenizer knows
            model = make()
            make, vocab_size = partial(replace, model), model.vocab_size
    config = EngineConfig(
        vocab_size=vocab_size,
        weights=weights,
        own_model=options.own_model,
        tokenizer=engine_options.existing_path(options.tokenizer),
        dtype=dtype,
        **engine_options.engine_fields(options, checkpoint, length),
        num_ranks=options.workers,
        max_length=length,
        max_waiting=options.max_waiting,
        serves=serves(options),
        prepare=tuple(options.prepare),
        **engine_options.restarts(options),
    )
    if checkpoint is not None:
        return make, config, checkpoint.config
    if options.own_model:
        return make, config, None
    tiny = tiny_config()
    return make, config, replace(tiny, dtype=dtype or tiny.dtype)
