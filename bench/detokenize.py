"""From token ids to strings and bytes: a table of all ids, against a tokenizer's `decode`.

Every contender gets one step's ids, emitted tokens and top K, and makes the string and the bytes of
each, and each request's new text. The strings are compared first. For a part of a character a
tokenizer gives U+FFFD and has no bytes, so there nothing is compared.

The tokenizer is a byte-level BPE of the `tokenizers` library, trained on the sources of Python's
standard library; nothing is downloaded.
"""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.timing import Comparison, Target, compare
from ipc.wire import Kind
from jax_specdec.export.openai import chat_logprobs
from jax_specdec.records.decode import decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.output_processor import ProcessorState, admit, step
from jax_specdec.records.record import Records
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.text.detokenize import TextStream, TokenTable, byte_level_bytes

REQUESTS, TOKENS, K = 64, 3, 20
VOCABULARY = 30_000
STEPS = 16  # in turn, so that a contender does not decode the same ids in every call

OURS = "table an id (ours)"
ENTRIES = "ours, records to chat entries"
BATCH, EACH = "tokenizers, decode_batch", "tokenizers, decode each"

Part = tuple[str, bytes | None]  # a token's string and bytes
Strings = tuple[list[list[Part]], list[str]]  # by request: all tokens of the step; the new text
Call = Callable[[], tuple[int, Any]]  # the step's index, and its `Strings` or chat entries


@dataclass(frozen=True)
class Step:
    """One step of B requests with n tokens each.

    Attributes:
      token_ids: [B, n] int32, emitted.
      topk_ids: [B, n, K] int32.
      records: the same, as the engine delivers them.
    """

    token_ids: NDArray[np.int32]
    topk_ids: NDArray[np.int32]
    records: Records

    @property
    def ids(self) -> NDArray[np.int32]:
        """[B, n * (K + 1)] int32, every id whose string is wanted."""
        both = np.concatenate([self.token_ids[..., None], self.topk_ids], axis=2)
        return both.reshape(len(both), -1)


def corpus(num_bytes: int) -> Iterator[str]:
    """Sources of Python's standard library, about `num_bytes` of them."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if num_bytes <= 0:
            return
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="ignore")
            num_bytes -= len(text)
            yield text


def trained(vocabulary: int, num_bytes: int) -> Any:
    """A byte-level BPE `tokenizers.Tokenizer` of exactly `vocabulary` ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus(num_bytes), trainer)
    return tokenizer


def table_of(tokenizer: Any) -> TokenTable:
    """The strings and bytes of a byte-level tokenizer."""
    names = map(tokenizer.id_to_token, range(tokenizer.get_vocab_size()))
    return TokenTable([byte_level_bytes(name) for name in names])


def steps_of(tokenizer: Any, num_steps: int, requests: int = REQUESTS, k: int = K) -> list[Step]:
    """Steps whose tokens are pieces of a text, and whose top K are drawn from the same text."""
    text = "".join(corpus(400_000)) + "\N{SNOWMAN}\U0001f600\u00e9" * 200
    ids = np.array(tokenizer.encode(text).ids, np.int32)
    rng, steps = np.random.default_rng(0), []
    for index in range(num_steps):
        begins = rng.integers(0, len(ids) - TOKENS, requests)
        token_ids = ids[begins[:, None] + np.arange(TOKENS)]
        topk_ids = rng.choice(ids, (requests, TOKENS, k))
        steps.append(Step(token_ids, topk_ids, _records(index, token_ids, topk_ids)))
    return steps


def ours(table: TokenTable, steps: list[Step]) -> Call:
    """Look each id up: afterwards every string, bytes object and text of the step exists."""
    turn = _turn(steps)

    def call() -> tuple[int, Strings]:
        (index, found), strings = next(turn), table.strings.__getitem__
        parts = [list(map(strings, ids)) for ids in found.ids.tolist()]
        texts = [TextStream(table).push(ids) for ids in found.token_ids.tolist()]
        return index, (parts, texts)

    return call


def entries(table: TokenTable, steps: list[Step]) -> Call:
    """Do more than the others: make the chat format's dictionaries, with the logprobs."""
    turn = _turn(steps)

    def call() -> tuple[int, list[Any]]:
        index, found = next(turn)
        return index, [chat_logprobs([record], table) for record in found.records]

    return call


def decode_each(tokenizer: Any, steps: list[Step]) -> Call:
    """The usual way: `decode` each token, encode its string, and stream the text."""
    from tokenizers.decoders import DecodeStream

    turn = _turn(steps)

    def call() -> tuple[int, Strings]:
        (index, found), parts, texts = next(turn), [], []
        for row, emitted in zip(found.ids, found.token_ids, strict=True):
            strings = [tokenizer.decode([token_id]) for token_id in row.tolist()]
            parts.append([(text, text.encode()) for text in strings])
            stream = DecodeStream(skip_special_tokens=True)
            new = [stream.step(tokenizer, token_id) for token_id in emitted.tolist()]
            texts.append("".join(text for text in new if text))
        return index, (parts, texts)

    return call


def decode_batch(tokenizer: Any, steps: list[Step]) -> Call:
    """The same with one `decode_batch` for all ids of the step, which uses all cores."""
    from tokenizers.decoders import DecodeStream

    turn = _turn(steps)

    def call() -> tuple[int, Strings]:
        (index, found), texts = next(turn), []
        flat = [[token_id] for token_id in found.ids.ravel().tolist()]
        pairs = [(text, text.encode()) for text in tokenizer.decode_batch(flat)]
        width = found.ids.shape[1]
        parts = [pairs[n : n + width] for n in range(0, len(pairs), width)]
        for emitted in found.token_ids:
            stream = DecodeStream(skip_special_tokens=True)
            new = [stream.step(tokenizer, token_id) for token_id in emitted.tolist()]
            texts.append("".join(text for text in new if text))
        return index, (parts, texts)

    return call


def checker(table: TokenTable, steps: list[Step]) -> Callable[[str, Any, Any], None]:
    """A check that a call's result equals our table's for the same step."""

    def check(name: str, _: Any, actual: tuple[int, Any]) -> None:
        index, result = actual
        _, expected = ours(table, steps[index:])()
        (_same_entries if name == ENTRIES else _same_strings)(expected, result)

    return check


def run(quick: bool) -> list[Comparison]:
    """Train a tokenizer, which takes seconds, and measure one comparison."""
    tokenizer = trained(VOCABULARY, 8_000_000 if quick else 30_000_000)
    return [measure(tokenizer, rounds=5 if quick else 15)]


def measure(tokenizer: Any, rounds: int, requests: int = REQUESTS, k: int = K) -> Comparison:
    """Measure all contenders on the same steps, after our table has seen each step once."""
    table, vocabulary = table_of(tokenizer), tokenizer.get_vocab_size()
    steps = steps_of(tokenizer, STEPS, requests, k)
    for warm in (ours(table, steps), entries(table, steps)):
        for _ in steps:
            warm()
    calls: dict[str, Call] = {
        OURS: ours(table, steps),
        ENTRIES: entries(table, steps),
        BATCH: decode_batch(tokenizer, steps),
        EACH: decode_each(tokenizer, steps),
    }
    found = compare(
        f"ids to strings and bytes: {requests} requests x {TOKENS} tokens, K = {k}",
        calls,
        check=checker(table, steps),
        rounds=rounds,
        settings={"requests": requests, "tokens": TOKENS, "k": k, "vocabulary": vocabulary},
    )
    promised = (requests, k, vocabulary) == (REQUESTS, K, VOCABULARY)
    targets = targets_of(found) if promised else ()
    return replace(found, suite="detokenize", targets=targets)


def targets_of(found: Comparison) -> tuple[Target, ...]:
    """The project's promise for a step."""
    return (Target("strings and bytes of a step", 0.6, 1e3 * found[OURS].median, "ms"),)


def _turn(steps: list[Step]) -> Iterator[tuple[int, Step]]:
    """The steps with their indices, in an endless cycle."""
    while True:
        yield from enumerate(steps)


def _records(index: int, token_ids: NDArray[np.int32], topk_ids: NDArray[np.int32]) -> Records:
    """The records of a message with these ids and random logprobs."""
    rng, (requests, n, k) = np.random.default_rng(index), topk_ids.shape
    state, slots = ProcessorState.empty(requests), []
    params = SamplingParams(max_tokens=2**31 - 1, logprobs=k)
    for slot in range(requests):
        state = admit(state, slot, 1, Request(id=str(slot), prompt_token_ids=(1,), params=params))
        slots.append(
            SlotContents(
                generation=1,
                num_drafts=n - 1,
                columns=k + 1,
                token_ids=token_ids[slot],
                token_ranks=np.ones(n, np.int32),
                logprobs=-np.sort(rng.exponential(size=(n, k + 1)).astype(np.float32)),
                topk_ids=topk_ids[slot],
            )
        )
    return step(state, decode(encode(Kind.TARGET, 0, slots)))[1]


def _same_strings(expected: Strings, actual: Strings) -> None:
    """Raises AssertionError unless the texts agree, and every token of whole characters."""
    (ours_parts, ours_texts), (parts, texts) = expected, actual
    assert texts == ours_texts
    whole = 0
    for left, right in zip(ours_parts, parts, strict=True):
        for (ours_text, ours_raw), (text, raw) in zip(left, right, strict=True):
            if ours_raw is not None and "\ufffd" not in ours_raw.decode(errors="replace"):
                assert (text, raw) == (ours_text, ours_raw)
                whole += 1
    assert whole > 0.9 * sum(map(len, parts)), "too few tokens are whole characters"


def _same_entries(expected: Strings, actual: list[Any]) -> None:
    """Raises AssertionError unless the chat entries have these strings and bytes."""
    for parts, logprobs in zip(expected[0], actual, strict=True):
        found = []
        for token in logprobs["content"]:
            found += [token, *token["top_logprobs"]]
        assert [(one["token"], bytes(one["bytes"])) for one in found] == parts
