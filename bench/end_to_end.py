"""The whole decoding loop with the shipped model: what logprobs add to it, by K and by drafter.

Every contender decodes the same prompts to the same tokens: prefill, steps, packing, the copy to
the host, decoding and the output processor. One process, no ring: that has its own suite.
"""

from collections.abc import Callable

import jax

from bench.timing import Comparison, compare
from jax_specdec import loop, output_processor, tokens
from jax_specdec.checkpoint import load_checkpoint, tiny_weights_path
from jax_specdec.control import Admit
from jax_specdec.decode import decode
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.worker import Compiled, Worker
from jax_specdec.worker_process import make_drafter

SLOTS = 8
PROMPTS = (
    "def __init__(self, ", "import os\nimport ", "class Error(Exception):\n    ", "for i in range(",
    "    raise ValueError(", '    """Return the ', "    with open(", "        return ",
)  # fmt: skip


class _Messages(list[bytes]):
    def send(self, data: object, /) -> None:
        self.append(bytes(memoryview(data)))  # type: ignore[arg-type]


def run(quick: bool = False) -> list[Comparison]:
    """Seconds to decode the prompts with logprobs off, K = 0, 5 and 20, for each drafter."""
    params, config, _ = load_checkpoint(tiny_weights_path())
    max_tokens = 24 if quick else 96
    results = []
    for drafter in ("mtp",) if quick else ("mtp", "ngram", "none"):
        settings = loop.LoopConfig(
            model=config,
            drafter=make_drafter(drafter, 3, config),
            num_slots=SLOTS,
            max_length=256,
        )
        compiled = Compiled(settings)

        def contender(k: int | None, settings: loop.LoopConfig = settings,
                      compiled: Compiled = compiled) -> Callable[[], list[list[int]]]:  # fmt: skip
            return lambda: decode_all(settings, compiled, params, k, max_tokens)

        names = {"no logprobs": None, "K = 0": 0, "K = 5": 5, "K = 20": 20}
        results.append(
            compare(
                f"decoding {SLOTS} requests x {max_tokens} tokens, drafter {drafter}",
                {name: contender(k) for name, k in names.items()},
                check=_same_tokens,
                rounds=3 if quick else 7,
                min_seconds=0.0,
                settings={
                    "slots": SLOTS,
                    "max_tokens": max_tokens,
                    "drafter": drafter,
                    "drafts": settings.drafter.num_drafts,
                    "vocabulary": config.vocab_size,
                    "device": jax.devices()[0].device_kind,
                },
            )
        )
    return results


def decode_all(
    settings: loop.LoopConfig, compiled: Compiled, params: object, k: int | None, max_tokens: int
) -> list[list[int]]:
    """The tokens of every prompt, in order of the prompts."""
    sent = _Messages()
    worker = Worker(settings, params, sent, compiled=compiled)  # type: ignore[arg-type]
    state = output_processor.ProcessorState.empty(SLOTS)
    emitted: dict[str, list[int]] = {}
    for slot, prompt in enumerate(PROMPTS):
        ids = tuple(tokens.encode(prompt, start_document=True).tolist())
        request = Request(
            id=prompt,
            prompt_token_ids=ids,
            params=SamplingParams(max_tokens=max_tokens, logprobs=k),
        )
        state = output_processor.admit(state, slot, 1, request)
        worker.apply(Admit(slot=slot, generation=1, request=request))
        emitted[prompt] = []
    while worker.busy:
        worker.advance()
        while sent:
            state, records = output_processor.step(state, decode(sent.pop(0)))
            for record in records:
                emitted[record.request_id] += record.token_ids.tolist()
    return list(emitted.values())


def _same_tokens(name: str, expected: list[list[int]], actual: list[list[int]]) -> None:
    assert actual == expected, "other tokens"
