"""The options of `EngineConfig.serves`, by the names of its fields."""

import argparse
from dataclasses import fields
from typing import Any

import jax_specdec.beside.ipc  # noqa: F401
from ipc.wire import MAX_CHOSEN, MAX_CHOSEN_OF_ROW, MAX_TOP_K, LogprobsMode
from jax_specdec.cli.argument_types import integer
from jax_specdec.declaration import MAX_CHANGED_IDS, USUAL, Serves

NONE = "none"
MODES = {mode.name.lower(): mode for mode in LogprobsMode}
# What each field's option says; `Serves` says more.
OPTION_HELP = {
    "sampling": "requests with a temperature",
    "max_logprobs": "logprobs of a token; or none",
    "max_extra_token_ids": "extra_token_ids of a request",
    "max_logprobs_mode": "the costliest mode of logprobs",
    "kept_token_ids": "requests for the ids that each token was drawn among",
    "entropy": "requests for the entropy at each token",
    "log_sum_exp": "requests for the log-sum-exp at each token",
    "row_digest": "requests for a digest of each token's logits",
    "draft_logprobs": "requests for the logprobs of drafts",
    "max_logprobs_of_prompts": "prompt_logprobs, and logprobs with echo; or none",
    "max_extra_token_ids_of_prompts": "prompt_extra_token_ids of a token",
    "max_changed_ids": "token ids in logit_bias, or held back by min_tokens",
    "penalties": "requests with a presence, frequency or repetition penalty",
    "grammars": "tools, response_format and structured_outputs",
}
_FIELDS = [field for field in fields(Serves) if field.name in OPTION_HELP]
LIMITS = {
    "max_logprobs": MAX_TOP_K,
    "max_extra_token_ids": MAX_CHOSEN,
    "max_logprobs_of_prompts": MAX_TOP_K,
    "max_extra_token_ids_of_prompts": MAX_CHOSEN_OF_ROW,
    "max_changed_ids": MAX_CHANGED_IDS,
}


def add_serves(parser: argparse.ArgumentParser) -> Any:
    """Add the options that say what requests may ask for at most; returns their group."""
    group = parser.add_argument_group(
        "what is served", "its programs are compiled before the server is ready; more is refused"
    )
    for field in _FIELDS:
        name, usual = field.name, getattr(USUAL, field.name)
        option, help_text = f"--{name.replace('_', '-')}", OPTION_HELP[name]
        if name in LIMITS:
            kind = _or_none(LIMITS[name]) if NONE in help_text else integer(0, LIMITS[name])
            group.add_argument(option, type=kind, default=usual, metavar="N",
                help=f"the most {help_text} (default: %(default)s)")  # fmt: skip
        elif name == "max_logprobs_mode":
            group.add_argument(option, choices=MODES, default=usual.name.lower(),
                help=f"{help_text} (default: %(default)s)")  # fmt: skip
        else:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=usual,
                help=f"{help_text} (default: {'yes' if usual else 'no'})")  # fmt: skip
    return group


def serves(options: argparse.Namespace) -> Serves:
    """The declaration that the options make."""
    values = {field.name: getattr(options, field.name) for field in _FIELDS}
    return Serves(**values | {"max_logprobs_mode": MODES[options.max_logprobs_mode]})


def _or_none(most: int) -> Any:
    """An argparse type: a number up to `most`, or None for "none"."""
    number = integer(0, most)
    return lambda text: None if text == NONE else number(text)
