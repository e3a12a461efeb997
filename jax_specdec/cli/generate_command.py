"""`jax-specdec generate`: prompts continued by a Hugging Face checkpoint, with logprobs."""

import argparse
import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

import jax_specdec.beside.ipc  # noqa: F401
from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.hf_names import HfModel, open_model
from jax_specdec.cli import engine_options, standard_output
from jax_specdec.cli.generate import GenerateRun, TextsInOrder, left_to_do, needs_records
from jax_specdec.cli.logs import logged
from jax_specdec.cli.prompts import Prompt, given_prompts, read_prompts
from jax_specdec.cli.resumable import JsonlOutput
from jax_specdec.cli.standard_output import RecordLines
from jax_specdec.declaration import Serves
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_ahead import worker_ahead
from jax_specdec.engine.worker_client import WorkerProcess
from jax_specdec.engine.workers import StartWorker
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import SamplingParams, Structured
from jax_specdec.text.tokenizer import Tokenizer
from jax_specdec.wording import pluralize

HELP = """\
Run prompts through a checkpoint in Hugging Face layout (Llama, Mistral, Mixtral, Qwen2, Qwen3,
Qwen3-MoE, Gemma 2 and 3, MiMo) or a GGUF file (Llama, Qwen2, Qwen3) with speculative decoding, and
write OpenAI-style records with exact logprobs: to --output, and where logprobs are asked for and
standard output is no terminal, there, in place of the texts.

Only local files are read; nothing is downloaded. With --output, an interrupted run can go on: run
the same command again.
"""

SAMPLING = (
    ("--max-tokens", int, 128, "N", "the most tokens to emit (default: %(default)s)"),
    ("--temperature", float, 0.0, "T", "0 is greedy (default: %(default)s)"),
    ("--top-k", int, 0, "K", "keep the K most likely tokens (default: all)"),
    ("--top-p", float, 1.0, "P", "keep the most likely tokens that add up to P (default: all)"),
    ("--min-p", float, 0.0, "P", "drop tokens less likely than P times the first (default: none)"),
    ("--seed", int, 0, "N", "each line's seed is N plus the line's number (default: 0)"),
    ("--logprobs", int, None, "K", "add each token's logprob, rank and K most likely tokens"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _add_files(parser)
    _add_sampling(parser.add_argument_group("sampling (a line of a .jsonl file may differ)"))
    _add_running(parser.add_argument_group("running"))


def _add_files(group: Any) -> None:
    group.add_argument("--model", type=Path, required=True, metavar="DIR",
        help="config.json, model.safetensors (or several files and their index), "
        "tokenizer.json; or a GGUF file")  # fmt: skip
    prompts = group.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT",
        help="a prompt, as it is; - is all of standard input. May be given several times",
    )  # fmt: skip
    prompts.add_argument("--prompts", type=Path, metavar="FILE",
        help=r"one prompt a line (\n stands for a new line; the name - for standard input); in a "
        'file whose name ends in .jsonl one object a line, {"prompt": ...} or {"messages": [...]}, '
        "with parameters of its own")  # fmt: skip
    group.add_argument("--output", type=Path, metavar="FILE",
        help="append one OpenAI-style record a line; requests with a record are not run again. "
        "With --ray a folder, with a file of columns (Arrow) for each replica")  # fmt: skip
    engine_options.add_special_tokens(group)
    group.add_argument("--quiet", action="store_true", help="do not show the texts")


def _add_sampling(group: Any) -> None:
    for name, kind, default, metavar, text in SAMPLING:
        group.add_argument(name, type=kind, default=default, metavar=metavar, help=text)
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after the token that ends a text"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
        help="a string that ends a text, and is no part of it. May be given several times",
    )  # fmt: skip
    group.add_argument("--logprobs-mode", choices=("raw", "scaled", "processed"), default="raw",
        help="the distribution that logprobs describe: the model's (raw), with the temperature "
        "(scaled), or the one that is sampled from (processed) (default: %(default)s)")  # fmt: skip
    group.add_argument("--kept-token-ids", action="store_true",
        help="add the ids that each token was drawn among, as a learner needs them")  # fmt: skip
    group.add_argument("--response-format", metavar="FILE",
        help="answer in JSON: by the JSON schema in FILE, or json_object for any",
    )  # fmt: skip


def _add_running(group: Any) -> None:
    engine_options.add_engine(group)
    engine_options.add_dtype(group)
    group.add_argument("--max-length", type=int, metavar="T",
        help="tokens that a slot holds (default: those of the longest prompt and its "
        "--max-tokens)")  # fmt: skip
    engine_options.add_restarts(group, default=None)
    engine_options.add_ray(group)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status, which is 1 where a request failed.

    Raises:
      OSError, ValueError: an option or a file cannot be used; the message is for the user.
      OSError: a record or a text cannot be written; its note says what was kept.
      WorkerFailed: the worker ended early; its note says what was kept.
    """
    engine_options.refuse_without_ray(options)
    model = open_model(options.model, dtype=options.dtype)
    if options.ray is not None:
        return _run(options, model, WorkerProcess)
    with worker_ahead(options.tensor_parallel) as start_worker:
        return _run(options, model, start_worker)


def _run(options: argparse.Namespace, model: HfModel, start_worker: StartWorker) -> int:
    with _without_collections():
        tokenizer = Tokenizer(
            options.model, model.config.vocab_size,
            special_in_messages=options.special_tokens_in_messages,
        )  # fmt: skip
    ends = dict.fromkeys((*model.hf.eos_token_ids, *tokenizer.eos_token_ids))
    defaults = _defaults(options, () if options.ignore_eos else tuple(ends))
    if options.prompts is None:
        prompts = given_prompts(options.prompt, tokenizer, defaults, options.stop)
    else:
        prompts = read_prompts(options.prompts, tokenizer, defaults, options.stop)
    settings = (options.model.resolve().name, model.config.dtype)
    # The configuration fits all prompts, so a resumed run compiles the same step.
    config, table = engine_config(options, model, prompts), tokenizer.table()
    if options.ray is not None:
        from jax_specdec.cli import generate_ray  # whose columns only it needs

        lasting = replace(config, on_worker_loss="restart", resume_lost=True)
        return generate_ray.run(options, lasting, prompts, settings, table)
    opened: contextlib.AbstractContextManager[JsonlOutput | None] = (
        JsonlOutput(options.output) if options.output else contextlib.nullcontext()
    )
    with opened as output:
        remaining = left_to_do(prompts, output, settings)
        if not remaining:
            return 0
        # Texts alone would lose what was asked for; a terminal shows it in colors.
        lines = output is None and not options.quiet and not sys.stdout.isatty()
        lines = lines and needs_records(remaining)
        result = GenerateRun(remaining, table, settings, RecordLines() if lines else output)
        show, style = standard_output.shower(quiet=options.quiet or lines)
        texts = TextsInOrder(remaining, table, show, style)
        print(f"loading {_size(model)} from {options.model}", file=sys.stderr)
        if lines:
            print(
                "standard output is no terminal: records with the logprobs, one a line (the texts "
                "alone: without --logprobs; --output FILE: records that a later run continues)",
                file=sys.stderr,
            )
        with result.tally.noting(options.output):
            _generate(config, start_worker, remaining, result, texts)
        if style and any(prompt.request.params.logprobs is not None for prompt in remaining):
            standard_output.legend(Console(), unknown=False)
        return result.tally.conclude(result.speculation)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Let Python look for no garbage in the block: what an import makes stays."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _generate(
    config: EngineConfig,
    start_worker: StartWorker,
    prompts: list[Prompt],
    result: GenerateRun,
    texts: TextsInOrder,
) -> None:
    """Run the prompts."""
    with (
        # Where a loss ends the command, its error says so.
        logged("error" if config.on_worker_loss == "stop" else "warning"),
        Engine(config, start_worker=start_worker) as engine,
        standard_output.waiting(
            standard_output.phases_of(engine), engine_options.kept_in(config.compilation_cache)
        ) as begun,
    ):
        end = partial(engine.abort, reason=FinishReason.STOP_STRING)
        for update in engine.generate([prompt.request for prompt in prompts]):
            begun()
            for part in result.add(update.records, end):
                texts.add(part)


def _structure(response_format: str | None) -> Structured | None:
    if response_format is None:
        return None
    if response_format == "json_object":
        return Structured("json_schema", '{"type": "object"}')
    return Structured("json_schema", Path(response_format).read_text("utf-8"))


def _size(model: HfModel) -> str:
    weights, item = model.config.num_parameters, 4 if model.config.dtype == "float32" else 2
    size = weights * item / 2**30
    return f"{pluralize(weights, 'weight', ',')} ({size:.2f} GiB in {model.config.dtype})"


def _defaults(options: argparse.Namespace, ends: tuple[int, ...]) -> SamplingParams:
    named = [option.removeprefix("--").replace("-", "_") for option, *_ in SAMPLING]
    return SamplingParams(
        **{name: getattr(options, name) for name in named},
        structured=_structure(options.response_format),
        stop_token_ids=ends,
        logprobs_mode=LogprobsMode[options.logprobs_mode.upper()],
        kept_token_ids=options.kept_token_ids,
    )


def engine_config(
    options: argparse.Namespace, model: HfModel, prompts: list[Prompt]
) -> EngineConfig:
    limit, requests = model.hf.max_length, [prompt.request for prompt in prompts]
    longest = max(len(request.prompt_token_ids) + request.params.max_tokens for request in requests)
    length = options.max_length or longest
    if limit is not None and length > limit:
        raise ValueError(
            f"{length} tokens in a slot are more than the {limit} positions that the model was "
            "made for: shorten prompts, --max-tokens or --max-length"
        )
    shared = engine_options.engine_fields(options, model, length)
    if options.max_length is None:
        length = engine_options.slot_length(length, limit)
    return EngineConfig(
        **shared | {"num_slots": min(options.slots, len(prompts))},
        max_length=length,
        vocab_size=model.config.vocab_size,
        weights=str(options.model.resolve()),
        dtype=model.config.dtype,
        starts_soon=True,
        serves=Serves.of(request.params for request in requests),
        **engine_options.restarts(options),
    )
