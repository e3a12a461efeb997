"""A worker that is ready compiles nothing, whatever is asked of what it serves."""

import collections
import functools
import itertools

import numpy as np
import pytest

from ipc.wire import LogprobsMode
from jax_specdec import control
from jax_specdec.control import ProcessStats, WorkerConfig
from jax_specdec.declaration import Serves
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.worker import worker_process
from jax_specdec.requests import SamplingParams
from tests.support import letters, requests
from tests.support.asking import NEEDS
from tests.support.compiled_here import compiled_here
from tests.support.decoding import VOCAB, Local, tokens_of

PROMPT = [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]  # longer than a chunk
# By the field of `Serves` that a request needs.
ASKED = {
    "sampling": {"temperature": 0.7, "top_p": 0.9},
    "max_logprobs": {"logprobs": 3},
    "max_extra_token_ids": {"logprobs": 0, "extra_token_ids": (4, 9, 30)},
    "max_logprobs_mode": {"logprobs": 1, "logprobs_mode": LogprobsMode.PROCESSED},
    "kept_token_ids": {"kept_token_ids": True, "temperature": 0.9, "top_k": 5},
    "entropy": {"logprobs": 1, "entropy": True},
    "log_sum_exp": {"logprobs": 0, "log_sum_exp": True, "temperature": 0.9},
    "row_digest": {"logprobs": 0, "row_digest": True},
    "draft_logprobs": {"logprobs": 2, "draft_logprobs": True},
    "max_logprobs_of_prompts": {"prompt_logprobs": 2},
    "max_extra_token_ids_of_prompts": {
        "prompt_logprobs": 0, "prompt_extra_token_ids": [[1, 2]] * (len(PROMPT) - 1),
    },
    "max_changed_ids": {"logit_bias": ((5, 3.0),), "min_tokens": 2, "stop_token_ids": (9,)},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "grammars": {"structured": letters.WORDS_PATTERN, "stop_token_ids": (letters.END,)},
}  # fmt: skip
BATCHES = [
    [{}],
    *([asked] for asked in ASKED.values()),  # alone
    *([asked, {}, {"temperature": 0.5}] for asked in ASKED.values()),  # beside those that ask less
    *([*ASKED.values()][start : start + 3] for start in range(0, len(ASKED), 3)),
]


def test_every_field_is_asked_for():
    assert list(ASKED) == list(NEEDS)


@pytest.fixture(params=["ngram", "mtp"])
def ready(request):
    """A worker as its process makes it ready, with programs of its own."""
    sizes = {"max_length": 80}  # of no other test's, whose programs would be there already
    config = Local(request.param, **sizes).worker.config
    serves = Serves.of(SamplingParams(**asked) for asked in ({}, *ASKED.values()))
    local = Local(
        request.param,
        programs=Compiled(config),
        serves=serves,
        adaptive=True,
        vocabulary=letters.vocabulary,
        **sizes,
        load=lambda path, params: params,
    )
    with compiled_here() as names:
        settings, stats = WorkerConfig(vocab_size=VOCAB), ProcessStats()
        every_kind = functools.partial(worker_process.kinds_before_ready, settings, None)
        worker_process.compile_served(local.worker, stats, every_kind)
        worker_process.rehearse(local.worker, settings, stats)
    # The negative control of what follows. (Copies of a prefix are compiled once a process.)
    assert {"jit(step)", "jit(choose)", "jit(score_chunk)"} <= {*names}
    return local


@pytest.mark.long
def test_nothing_is_compiled_for_any_served_kind(ready):
    """Alone, beside others, evicted, and with other weights; at both widths."""
    worker, kinds = ready.worker, set()
    run = worker.run_kind
    worker.run_kind = lambda kind: kinds.add(kind) or run(kind)
    turns = collections.defaultdict(itertools.count)

    def in_turn(kind, slots, narrower):  # times decide elsewhere
        widths = [kind, *narrower]
        return widths[next(turns[kind]) % len(widths)]

    worker.step_widths.choose = in_turn
    with compiled_here() as names:
        for number, batch in enumerate(BATCHES):
            ids = [f"{number}.{place}" for place, _ in enumerate(batch)]
            for seed, (name, asked) in enumerate(zip(ids, batch, strict=True)):
                ready.admit(requests.request(name, PROMPT, max_tokens=24, seed=seed, **asked))
            if number % 3 == 0:
                ready.advance(3)
                ready.rank.evict(ids[0], reschedule=True)
            if number == len(BATCHES) - 1:
                ready.advance(4)
                ready.tell(control.Prepare(number=1, path="again"))
                ready.tell(control.Commit(number=1, version=2))
            ready.drain()
            for name in ids:
                ready.rank.leave(name)
    assert names == []
    expected = {kind for kind in worker.kinds() if not kind.has_grammar or kind.num_drafts is None}
    assert kinds >= expected  # each rung was run, with drafts and without
    text = alone(ready, "grammars")
    assert letters.text_of(tokens_of(text)) in letters.WORDS
    drafts = [record.draft for record in alone(ready, "draft_logprobs") if record.draft is not None]
    assert bool(drafts) == worker.outgoing.sends_drafts
    assert all(np.isfinite(draft.logprobs[:, 0]).all() for draft in drafts)


def alone(local, field):
    """The records of the request that asked for this alone."""
    return local.records[f"{list(ASKED).index(field) + 1}.0"]
