"""Options of engines that the commands share: who drafts, slots, devices, losses, and where."""

import argparse
import os
from pathlib import Path
from typing import Any

import jax_specdec.beside.ipc  # noqa: F401
from ipc.wire import MAX_DRAFTS
from jax_specdec import compiled_programs
from jax_specdec.checkpoint.hf_names import HfModel, open_model
from jax_specdec.cli.argument_types import integer, seconds
from jax_specdec.compiled_programs import OFF, default_folder
from jax_specdec.control import DRAFT_WIDTHS, DRAFTERS, IMPLEMENTATIONS
from jax_specdec.text.tokenizer import Tokenizer

LENGTH_STEP = 128  # slot lengths are multiples of it
_WINDOW = 600.0  # seconds in which losses count
# Options that have the names of fields of `EngineConfig`.
_SAME = (
    "draft_width", "tensor_parallel", "batch_invariant", "compilation_cache", "implementation",
)  # fmt: skip


def existing_path(path: Path | None) -> str:
    """The absolute path of a file or a directory, for a worker; "" for None.

    Raises:
      OSError: the path leads nowhere.
    """
    if path is None:
        return ""
    path.stat()  # its error names the whole path; that of a strict `resolve` only a part of it
    return str(path.resolve())


def add_dtype(group: Any) -> None:
    """Add the option for the type to compute in."""
    group.add_argument("--dtype", choices=("bfloat16", "float32"), default="",
        help="the type to compute in (default: the checkpoint's; float32 for a float16 one)",
    )  # fmt: skip


def add_programs(group: Any) -> None:
    """Add the options for where compiled programs are kept, and whose kernels they take."""
    group.add_argument("--compilation-cache", default="", metavar="DIR",
        help="where compiled programs are kept for the next start, or off (default: the user's "
        "cache directory)")  # fmt: skip
    group.add_argument("--implementation", choices=IMPLEMENTATIONS, default="",
        help="what computes the logprobs and draws; xla uses no kernel of this package (default: "
        "the kernels that passed check-device here)")  # fmt: skip


def add_engine(group: Any) -> None:
    """Add the options that say who drafts, and how much a worker runs at once."""
    group.add_argument("--drafter", choices=DRAFTERS,
        help="where drafts come from: the model's own head (mtp), the latest n-gram or the longest "
        "suffix of the request's text, a smaller model, or none (default: model with "
        "--draft-model, otherwise mtp if the model has a head, otherwise ngram)")  # fmt: skip
    group.add_argument("--draft-model", type=Path, metavar="DIR",
        help="a smaller checkpoint with the same tokenizer, which drafts")  # fmt: skip
    group.add_argument("--drafts", type=integer(0, MAX_DRAFTS), default=3, metavar="N",
        help=f"the most draft tokens a step, 0 to {MAX_DRAFTS} (default: %(default)s)")  # fmt: skip
    group.add_argument("--draft-width", choices=DRAFT_WIDTHS, default="adaptive",
        help="a step verifies all drafts or none, as pays (adaptive), or always all (fixed): with "
        "drafts of a model, seeded requests repeat only then (default: %(default)s)")  # fmt: skip
    group.add_argument("--slots", type=integer(1), default=8, metavar="B",
        help="requests that a worker decodes together (default: %(default)s)")  # fmt: skip
    group.add_argument("--tensor-parallel", type=integer(1, 2**10), default=1, metavar="N",
        help="devices among which each worker splits the model; "
        "without accelerators it makes N CPU devices (default: %(default)s)")  # fmt: skip
    group.add_argument("--batch-invariant", action="store_true",
        help="a token's logprob has the same bits whatever else runs; steps and prompts cost more "
        "(docs/same_bits.md)")  # fmt: skip
    add_programs(group)


def engine_fields(
    options: argparse.Namespace, model: HfModel | None, max_length: int
) -> dict[str, Any]:
    """The fields of `EngineConfig` that these options set; arguments and errors as `drafting`."""
    if options.compilation_cache not in ("", OFF) and getattr(options, "ray", None) is None:
        _make_cache(Path(options.compilation_cache))
    return {
        **drafting(options, model, max_length),
        "num_slots": options.slots,
        **{name: getattr(options, name) for name in _SAME},
    }


def _make_cache(folder: Path) -> None:
    """Make the folder of compiled programs, in which every worker would fail otherwise.

    Raises:
      OSError: it cannot be made, or not written into.
    """
    try:
        compiled_programs.make(folder)
    except OSError as error:
        why = error.strerror or error
        raise OSError(
            error.errno,
            f"--compilation-cache {folder} cannot be used ({why}): name another folder, or off",
        ) from error


def kept_in(setting: str) -> str:
    """The folder of compiled programs that `--compilation-cache` names, for people; "" for none."""
    other = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    return "" if setting == OFF else setting or other or str(default_folder())


def slot_length(longest: int, limit: int | None) -> int:
    """The tokens of a slot for requests of up to `longest`: few lengths, so few programs."""
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, limit or 2**31 - 1)


def drafting(options: argparse.Namespace, model: HfModel | None, max_length: int) -> dict[str, Any]:
    """The fields of `EngineConfig` that say who drafts.

    Args:
      options: of the command.
      model: the checkpoint that verifies; None for the model that comes along, which has a head.
      max_length: tokens of a slot.

    Raises:
      OSError, ValueError: an option or a file cannot be used.
    """
    has_own_model = bool(getattr(options, "own_model", ""))
    has_mtp = not has_own_model if model is None else model.config.num_mtp_layers > 0
    default = "model" if options.draft_model else "mtp" if has_mtp else "ngram"
    drafter = options.drafter or default
    if drafter == "mtp" and model is not None and not has_mtp:
        raise ValueError(
            f"{options.model} has no MTP head in DeepSeek's layout (model.layers."
            f"{model.config.num_layers}.eh_proj.weight) or MiMo's (model.mtp_layers.0): choose "
            "--drafter ngram, suffix or none, or give a --draft-model"
        )
    if options.draft_model and drafter != "model":
        raise ValueError(f"--draft-model is for --drafter model; {drafter} would not use it")
    if drafter == "model" and not options.draft_model:
        raise ValueError("--drafter model needs --draft-model DIR, a smaller checkpoint")
    if drafter == "model":
        if has_own_model:
            raise ValueError("--draft-model is not for --own-model: choose ngram or suffix")
        if model is None:
            raise ValueError("--draft-model needs --model: the tiny model has no smaller one")
        _check_draft_model(options.model, options.draft_model, model, max_length)
    if not options.drafts:
        drafter = "none"
    return {
        "drafter": drafter,
        "num_drafts": options.drafts if drafter != "none" else 0,
        "draft_model": str(options.draft_model.resolve()) if drafter == "model" else "",
    }


def _check_draft_model(target: Path, draft: Path, model: HfModel, max_length: int) -> None:
    """Refuse a draft model of another tokenizer, or of too few positions."""
    small = open_model(draft, dtype=model.config.dtype)
    if small.hf.max_length is not None and max_length > small.hf.max_length:
        raise ValueError(
            f"{max_length} tokens in a slot are more than the {small.hf.max_length} positions that "
            f"{draft} was made for: choose a smaller --max-length or another --draft-model"
        )
    ours, theirs = (
        Tokenizer(directory, model_parts.config.vocab_size)
        for directory, model_parts in ((target, model), (draft, small))
    )
    for id, (model_parts, other) in enumerate(
        zip(ours.token_bytes, theirs.token_bytes, strict=False)
    ):
        names = ours.special.get(id), theirs.special.get(id)
        if (model_parts, names[0]) != (other, names[1]):
            raise ValueError(
                f"{draft} has another tokenizer than {target}: id {id} is {names[1] or other!r} "
                f"there and {names[0] or model_parts!r} here; a draft model needs the same one"
            )


def add_special_tokens(group: Any) -> None:
    """Add the option for what special tokens in messages are."""
    group.add_argument("--special-tokens-in-messages", action="store_true",
        help="let messages hold special tokens by their texts, such as <|im_end|>, so that who "
        "writes a message can end its turn; otherwise these are text, and only the chat template "
        "writes special tokens")  # fmt: skip


def add_restarts(group: Any, *, default: int | None) -> None:
    """Add the options for how often lost workers are replaced.

    Args:
      default: replacements; None: without the option, the first loss ends the command.
    """
    default_text = "none: the first loss ends the command" if default is None else default
    group.add_argument("--max-restarts", type=integer(0), default=default, metavar="N",
        help="new workers in place of lost ones, for each, within --restart-window; a loss that is "
        f"put down to a request does not count (default: {default_text})")  # fmt: skip
    group.add_argument("--restart-window", type=seconds, metavar="SECONDS",
        help=f"after which a loss counts no more (default: {_WINDOW:g})")  # fmt: skip


def restarts(options: argparse.Namespace) -> dict[str, Any]:
    """The options as those of `EngineConfig`.

    Raises:
      ValueError: there is a window, and nothing that it holds for.
    """
    window = options.restart_window
    if options.max_restarts is None:
        if window is not None:
            raise ValueError("--restart-window is for --max-restarts: add it")
        return {}
    return {
        "on_worker_loss": "restart",
        "resume_lost": True,
        "max_restarts": options.max_restarts,
        "restart_window": _WINDOW if window is None else window,
    }


def add_ray(group: Any) -> None:
    """Add the options for where engines run, and how many."""
    group.add_argument("--ray", nargs="?", const="", metavar="ADDRESS",
        help="run engines on a Ray cluster: that of the head at ADDRESS (host:port), or the one "
        "that RAY_ADDRESS names or this node belongs to, or else on this machine alone",
    )  # fmt: skip
    group.add_argument("--replicas", type=integer(1, 2**16), default=1, metavar="N",
        help="engines, each on devices of its own (default: %(default)s)")  # fmt: skip
    group.add_argument("--replica-devices", type=numbers, default={"CPU": 1.0}, metavar="KIND=N,..",
        help="what a replica takes of a node, such as GPU=4 or TPU=4 (default: CPU=1)")  # fmt: skip


def numbers(text: str) -> dict[str, float]:
    """An argparse type: numbers by name, such as "GPU=4,CPU=2"."""
    values = {}
    for part in text.split(","):
        name, sign, amount = part.partition("=")
        try:
            values[name.strip()] = float(amount)
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=N, such as GPU=4")
    return values


def refuse_without_ray(options: argparse.Namespace) -> None:
    """Refuse options that mean nothing on one machine.

    Raises:
      ValueError: names the option.
    """
    if options.ray is None and (options.replicas != 1 or options.replica_devices != {"CPU": 1.0}):
        raise ValueError("--replicas and --replica-devices are for --ray: add it")
    if getattr(options, "scaling", None) and options.max_replicas is None:
        raise ValueError("--scaling is for --max-replicas: add it")
