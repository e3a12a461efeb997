"""Texts in the order of their prompts, each as it grows."""

from types import SimpleNamespace

import numpy as np
import pytest

from jax_specdec.cli import generate
from jax_specdec.cli.prompts import Prompt
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request
from jax_specdec.text.detokenize import TokenTable

pytestmark = pytest.mark.fast


class Shown(list):
    def __call__(self, kind, text):
        self.append((kind, text))


def prompts(*ids, chat=False):
    return [Prompt(Request(id=id, prompt_token_ids=(65, 66)), chat) for id in ids]


def record(id, text, reason=None):
    ids = np.frombuffer(text if isinstance(text, bytes) else text.encode(), np.uint8)
    return SimpleNamespace(request_id=id, token_ids=ids, finish_reason=reason)


TABLE = TokenTable([bytes([byte]) for byte in range(256)])


def test_one_text_grows_at_a_time_in_the_order_of_the_prompts():
    shown = Shown()
    texts = generate.TextsInOrder(prompts("a", "b", "c"), TABLE, shown)
    assert not shown  # before the first record, the worker loads or refuses
    for part in (
        record("b", "one "), record("a", "uno "), record("c", "eins", FinishReason.LENGTH),
        record("a", "due"), record("b", "two"), record("a", "", FinishReason.STOP_TOKEN),
        record("b", "!", FinishReason.LENGTH),
    ):  # fmt: skip
        texts.add(part)
    assert shown == [
        ("title", "== a ==\n"), ("prompt", "AB"), ("text", "uno "), ("text", "due"), ("text", "\n"),
        ("title", "== b ==\n"), ("prompt", "AB"), ("text", "one "), ("text", "two"), ("text", "!"),
        ("text", "\n"),
        ("title", "== c ==\n"), ("prompt", "AB"), ("text", "eins"), ("text", "\n"),
    ]  # fmt: skip


def test_tokens_of_requests_with_logprobs_have_styles():
    """Tokens of one style are shown together, and a character has the style of its last byte."""
    shown = Shown()
    texts = generate.TextsInOrder(
        prompts("a"), TABLE, shown, lambda logprob, accepted: f"{logprob:g} {accepted}"
    )
    first = record("a", "abé")
    first.num_accepted = 2
    first.logprobs = np.float32([[-0.5, -1], [-0.5, -1], [-0.5, -1], [-2, -1]])
    texts.add(first)
    last = record("a", "c", FinishReason.LENGTH)
    last.logprobs = None
    texts.add(last)
    assert shown == [
        ("prompt", "AB"), ("-0.5 True", "ab"), ("-2 False", "é"), ("text", "c"), ("text", "\n"),
    ]  # fmt: skip


def test_half_characters_early_ends_and_conversations():
    shown = Shown()
    texts = generate.TextsInOrder(prompts("a", chat=True), TABLE, shown)
    texts.add(record("a", "é".encode()[:1]))
    texts.add(record("a", "é".encode()[1:] + b"\xf0"))
    texts.add(record("a", "", FinishReason.WORKER_LOST))
    assert shown == [
        ("text", "é"), ("text", "\ufffd"), ("error", "[ended early: worker_lost]"), ("text", "\n"),
    ]  # fmt: skip
