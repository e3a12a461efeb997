"""The options that say what a server serves have the names of the fields, and their values."""

import argparse
from dataclasses import fields, replace

import pytest

from ipc.wire import LogprobsMode
from jax_specdec.cli.serves_options import add_serves, serves
from jax_specdec.declaration import USUAL, Serves


def parsed(*options):
    parser = argparse.ArgumentParser()
    add_serves(parser)
    return serves(parser.parse_args(options))


def test_without_options_the_usual_is_served():
    assert parsed() == USUAL


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ("--max-logprobs 50", {"max_logprobs": 50}),
        ("--max-logprobs none --no-sampling", {"max_logprobs": None, "sampling": False}),
        ("--max-logprobs-of-prompts none", {"max_logprobs_of_prompts": None}),
        ("--max-extra-token-ids 0", {"max_extra_token_ids": 0}),
        ("--max-logprobs-mode processed", {"max_logprobs_mode": LogprobsMode.PROCESSED}),
        ("--kept-token-ids --draft-logprobs", {"kept_token_ids": True, "draft_logprobs": True}),
        ("--no-penalties --no-grammars", {"penalties": False, "grammars": False}),
        ("--max-changed-ids 1024", {"max_changed_ids": 1024}),
    ],
)
def test_an_option_sets_its_field(options, changes):
    assert parsed(*options.split()) == replace(USUAL, **changes) != USUAL


def test_every_refusal_names_an_option_that_is_there(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    said = capsys.readouterr().out
    for field in fields(Serves):
        if field.name != "alike":  # which follows from requests
            assert f"--{field.name.replace('_', '-')}" in said
