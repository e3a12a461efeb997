"""`jax-specdec score`: the logprobs of prompts' own tokens and their top K, as columns."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax_specdec.checkpoint.hf_names import HfModel, open_model
from jax_specdec.cli import standard_output
from jax_specdec.cli.engine_options import add_checkpoint, add_dtype, add_programs, slot_length
from jax_specdec.cli.generate import Tally, left_to_do
from jax_specdec.cli.prompts import Prompt, read_prompts
from jax_specdec.cli.scored_parts import ScoredParts, scored_sequence
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.worker_client import WorkerFailed
from jax_specdec.requests import RequestError, SamplingParams
from jax_specdec.text.tokenizer import Tokenizer

HELP = """\
Score prompts with a checkpoint in Hugging Face layout: each token's logprob and rank given those
before it, and the K most likely tokens there, as a teacher gives them to a student.

Writes Parquet files, one row a sequence. An interrupted run can go on: run the same command again.
"""
CHUNK = 512  # prompt tokens at a time, of one prompt: the weights are read once for them
SCORES_BYTES = 256 << 20  # of a layer's attention scores; a chunk of a long prompt is smaller
SECONDS = 30.0  # after which a part is written, and its tokens a second are said


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_checkpoint(parser)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE",
        help=r"one prompt a line (\n stands for a new line; the name - for standard input); in a "
        'file whose name ends in .jsonl one object a line, {"prompt": ...}, {"messages": [...]} or '
        '{"prompt_token_ids": [...]}, with an "id" or without')  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="DIR",
        help="a folder for part-00001.parquet and so on; sequences that it has are not run "
        "again")  # fmt: skip
    parser.add_argument("--logprobs", type=int, default=0, metavar="K",
        help="the K most likely tokens of each place, up to 512 (default: %(default)s)",
    )  # fmt: skip
    add_dtype(parser)
    parser.add_argument("--slots", type=int, default=8, metavar="B",
        help="prompts that are in memory together (default: %(default)s)")  # fmt: skip
    add_programs(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status, which is 1 where a prompt was not scored.

    Raises:
      OSError, ValueError: an option or a file cannot be used; the message is for the user.
      WorkerFailed: the worker ended early; its note says what was kept.
    """
    # One token is emitted, and dropped: a request has at least one.
    params = SamplingParams(max_tokens=1, prompt_logprobs=options.logprobs)
    model = open_model(options.model, dtype=options.dtype)
    tokenizer = Tokenizer(options.model, model.config.vocab_size)
    prompts = read_prompts(options.prompts, tokenizer, params)
    _check_parameters(prompts, params)
    settings = (options.model.resolve().name, model.config.dtype)
    with ScoredParts(options.output) as parts:
        left = left_to_do(prompts, parts, settings, "prompt")
        if not left:
            return 0
        tally = Tally(len(left), "prompt")
        _score(_engine_config(options, model, prompts), left, parts, options, settings, tally)
    return tally.conclude()


def _check_parameters(prompts: list[Prompt], params: SamplingParams) -> None:
    for prompt in prompts:
        own = replace(prompt.request.params, seed=params.seed)
        if own != params:
            raise RequestError(
                f"prompt {prompt.request.id!r} has parameters of its own, but scoring has none: "
                "leave its prompt and its id; --logprobs holds for all lines"
            )


def _score(
    config: EngineConfig,
    prompts: list[Prompt],
    parts: ScoredParts,
    options: argparse.Namespace,
    settings: tuple[str, ...],
    tally: Tally,
) -> None:
    """Run the prompts, and write what came of them."""
    by_id = {prompt.request.id: prompt for prompt in prompts}
    rows: dict[str, list[Any]] = {id: [] for id in by_id}
    said = time.monotonic()
    ends = (KeyboardInterrupt, WorkerFailed)  # after them, what was scored is written
    with tally.noting(options.output, ends):
        try:
            with (
                Engine(config) as engine,
                standard_output.waiting(standard_output.phases_of(engine)) as begun,
            ):
                for update in engine.generate([prompt.request for prompt in prompts]):
                    begun()
                    for record in update.records:
                        id, reason = record.request_id, record.finish_reason
                        if record.prompt is not None:
                            rows[id].append(record.prompt)
                        if reason is None:
                            continue
                        mine = rows.pop(id)
                        if not tally.end(id, reason):
                            continue
                        ids = by_id[id].request.prompt_token_ids
                        digest = by_id[id].digest(*settings)
                        tally.tokens += len(ids)
                        one = scored_sequence(id, digest, ids, mine, options.logprobs)
                        if parts.add(one) or time.monotonic() - said >= SECONDS:
                            parts.write()
                            said = time.monotonic()
                            print(tally.line(), file=sys.stderr)
        except ends:
            parts.write()
            raise
        parts.write()


def _engine_config(
    options: argparse.Namespace, model: HfModel, prompts: list[Prompt]
) -> EngineConfig:
    longest = max(len(prompt.request.prompt_token_ids) for prompt in prompts) + 1
    limit = model.hf.max_length
    if limit is not None and longest > limit:
        raise ValueError(
            f"a prompt of {longest - 1} tokens and the token behind it are more than the {limit} "
            "positions that the model was made for: shorten it, or cut it in two"
        )
    max_length = slot_length(longest, limit)
    scores = 4 * model.config.num_heads * max_length
    return EngineConfig(
        drafter="none",
        num_drafts=0,
        num_slots=min(options.slots, len(prompts)),
        max_length=max_length,
        prefill_chunk=max(8, min(CHUNK, max_length, SCORES_BYTES // scores)),
        vocab_size=model.config.vocab_size,
        weights=str(options.model.resolve()),
        dtype=model.config.dtype,
        compilation_cache=options.compilation_cache,
        implementation=options.implementation,
    )
