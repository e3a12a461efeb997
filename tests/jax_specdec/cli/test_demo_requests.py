"""The demo's requests, and the records that it writes."""

import json
from pathlib import Path

import pytest

from jax_specdec.cli import demo_requests
from jax_specdec.device.messages.buckets import k_bucket
from jax_specdec.records import output_processor
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.text import byte_tokens
from tests.support.processor_messages import target
from tests.support.processor_messages import tokens as slot

pytestmark = pytest.mark.fast


def test_the_built_in_requests_ask_for_many_things():
    requests = demo_requests.default_requests()
    assert len(requests) >= 16
    assert len({len(request.prompt_token_ids) for request in requests}) > 8
    asked = [request.params.logprobs for request in requests]
    assert {None, 0, 20} <= set(asked)
    assert {0.0} < {request.params.temperature for request in requests}


def largest_k(requests, slots, tokens_a_step):
    """The largest K that runs, step by step, in this many slots that are filled in order."""
    waiting, running, found = list(requests), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append([waiting[0].params.max_tokens, waiting.pop(0).params.logprobs])
        found.append(max(k if k is not None else -1 for _, k in running))
        for one in running:
            one[0] -= tokens_a_step
        running = [one for one in running if one[0] > 0]
    return found


def buckets(largest):
    return {k_bucket(k, byte_tokens.VOCAB_SIZE) for k in largest}


@pytest.mark.parametrize("tokens_a_step", [2, 3, 4])
def test_every_batch_of_the_demo_runs_the_same_program(tokens_a_step):
    """The largest K of a batch is part of its program, which costs a start two seconds."""
    requests = demo_requests.default_requests()
    assert buckets(largest_k(requests, 8, tokens_a_step)) == {20}
    # Negative control: without those of K = 20, a second program would be read.
    narrow = [one for one in requests if one.params.logprobs != 20]
    assert len(buckets(largest_k(narrow, 8, tokens_a_step))) > 1


def test_options_change_every_request():
    plain = demo_requests.default_requests()
    assert demo_requests.with_options(plain) == plain
    changed = demo_requests.with_options(plain, k=7, temperature=0.5, max_tokens=9)
    assert {(r.params.logprobs, r.params.temperature, r.params.max_tokens) for r in changed} == {
        (7, 0.5, 9)
    }
    assert {r.params.logprobs for r in demo_requests.with_options(plain, no_logprobs=True)} == {
        None
    }
    drafts = demo_requests.with_options(plain, draft_logprobs=True)
    assert [r.params.draft_logprobs for r in plain + drafts] == [False] * 18 + [True] * 18


def test_one_rule_gives_every_request_its_top_p():
    def pairs(requests):
        return {(r.params.temperature > 0, r.params.top_p) for r in requests}

    plain = demo_requests.default_requests()
    assert pairs(plain) == {(False, 1.0), (True, 0.95)}
    assert pairs(demo_requests.with_options(plain, temperature=0.7)) == {(True, 0.95)}
    assert pairs(demo_requests.with_options(plain, temperature=0.0)) == {(False, 1.0)}


def test_only_a_line_feed_ends_a_prompt(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("a\fb\r\n\u2028c\x85\u2029d\n \n\\n\\t\\\\\re\n".encode())
    prompts = [
        byte_tokens.decode(r.prompt_token_ids[1:]) for r in demo_requests.requests_from_file(path)
    ]
    assert prompts == ["a\fb", "\u2028c\x85\u2029d", "\n\t\\\re"]


def test_a_full_disk_is_reported_with_the_files_name():
    """The file is closed at once: left open, it would fail again where no code catches it."""
    collector = demo_requests.Collector.of(demo_requests.default_requests())
    with (
        pytest.raises(OSError, match=r"No space left on device: '/dev/full'"),
        demo_requests.open_json(Path("/dev/full")) as file,
    ):
        demo_requests.write_json(file, collector)


def test_an_invalid_row_and_minus_infinity_survive_json(tmp_path):
    request = Request(
        id="r", prompt_token_ids=(256, 65), params=SamplingParams(max_tokens=2, logprobs=1)
    )
    state = output_processor.ProcessorState.empty(1)
    state = output_processor.admit(state, 0, 1, request)
    values = [[float("nan"), float("nan")], [-float("inf"), -0.5]]
    message = target(0, slot(200, 66, columns=2, logprobs=values))
    _, records = output_processor.step(state, message)
    collector = demo_requests.Collector.of([request])
    for record in records:
        collector.outputs["r"].add(record)
    with demo_requests.open_json(tmp_path / "r.jsonl") as file:
        demo_requests.write_json(file, collector)
    record = json.loads((tmp_path / "r.jsonl").read_text())
    logprobs = record["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -9999.0]
    assert logprobs["tokens"] == ["bytes:\\xc8", "B"]
    assert record["speculation"]["cumulative_logprob"] is None
