"""What an engine runs, and which requests it can serve. Never jax."""

from dataclasses import dataclass

from ipc import wire
from jax_specdec.requests import Request, RequestError, check_served

MAX_DRAFTS = 64  # far beyond what pays; every draft is a row of each slot and step


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to run; sizes are checked when the engine starts.

    Attributes:
      drafter: "mtp", "ngram" or "none".
      num_drafts: draft tokens a step at most.
      num_slots: requests that decode together.
      max_length: prompt and emitted tokens of a request.
      vocab_size: ids below it are legal in a prompt.
      weights: a safetensors file; empty for the weights that come with the package.
      prefill_chunk: prompt tokens that run between two steps.
      ring_slots: messages that may wait for the engine.
    """

    drafter: str = "mtp"
    num_drafts: int = 3
    num_slots: int = 8
    max_length: int = 512
    vocab_size: int
    weights: str = ""
    prefill_chunk: int = 64
    ring_slots: int = 16

    def __post_init__(self) -> None:
        limits = (
            ("num_drafts", 0, MAX_DRAFTS),
            ("num_slots", 1, 2**16),
            ("max_length", 2, 2**31 - 1),
            ("prefill_chunk", 1, 2**16),
            ("ring_slots", 1, 2**16),
        )
        for name, low, high in limits:
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} = {getattr(self, name)} must be from {low} to {high}")

    @property
    def message_bytes(self) -> int:
        """The largest message that a step can make: every slot with every draft and the top K."""
        tokens = [self.num_drafts + 1] * self.num_slots
        columns = [min(wire.MAX_TOP_K, self.vocab_size) + 1] * self.num_slots
        return wire.WORD_BYTES * wire.words_bound(tokens, columns, [0] * self.num_slots)


def check(request: Request, config: EngineConfig) -> None:
    """Refuse what cannot be served, before any of it reaches the worker.

    Raises:
      RequestError: a prompt id outside the vocabulary, or more tokens than a slot holds.
      NotServed: a mode or a feature that this worker does not do.
    """
    params, ids = request.params, request.prompt_token_ids
    if not 0 <= min(ids) <= max(ids) < config.vocab_size:
        wrong = next(i for i in ids if not 0 <= i < config.vocab_size)
        raise RequestError(
            f"request {request.id!r}: prompt token id {wrong} is outside the vocabulary "
            f"(0 to {config.vocab_size - 1})"
        )
    if len(ids) + params.max_tokens > config.max_length:
        raise RequestError(
            f"request {request.id!r}: {len(ids)} prompt tokens and max_tokens = "
            f"{params.max_tokens} exceed the {config.max_length} tokens of a slot; "
            "shorten one of them or raise max_length"
        )
    if params.logprobs is not None and params.logprobs > config.vocab_size:
        raise RequestError(
            f"request {request.id!r}: logprobs = {params.logprobs}, but the vocabulary has only "
            f"{config.vocab_size} tokens"
        )
    check_served(request)
