"""The loop's benchmark: equal work for everybody, a wrong contender is caught, a trace is valid."""

import itertools
import json
import math
import time
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from bench import host
from bench.loop import consumer, content, rig, setups, spans, suite, timeline
from bench.loop.suite import GREEDY, K0, K20, OFF, ONE
from bench.report import plots
from bench.timing import BenchError
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import init_state
from jax_specdec.device.model.params import init_params
from jax_specdec.requests import Request, SamplingParams

MODEL = ModelConfig.tiny(vocab_size=64)
PARAMS = init_params(MODEL, jax.random.key(0))
SETUP = setups.Setup("a test's model", lambda: (PARAMS, MODEL), steps=3, apart=2, rounds=1)
ON_CPU = [one for one in GREEDY if one.kernel != "separate"]


@pytest.fixture(scope="module")
def compiled():
    return Compiled(SETUP.loop_config(MODEL))


@pytest.fixture(scope="module")
def found(compiled):
    """One round of every contender."""
    return suite.measure("a test", SETUP, ON_CPU, PARAMS, MODEL, compiled)


def test_every_contender_is_measured_or_says_why_not(found):
    missing = {name.removeprefix("NOT RUN ") for name in found.notes}
    assert {*found.names} | missing == {one.name for one in ON_CPU}
    assert {OFF, K0, "K = 5", K20, ONE, "K = 20, naive kernel", "K = 20, the usual way"} <= {
        *found.names
    }
    assert all(timing.median > 0 for timing in found.timings)


def test_only_what_was_asked_for_travels_and_fixed_messages_do_not_shrink(found):
    figures = found.figures
    size = {name: row["bytes"] for name, row in figures.items()}
    rows = {name: row["rows"] for name, row in figures.items()}
    assert rows[OFF] == 0
    assert rows[ONE] < rows[K20] / 32
    assert size[OFF] < size[ONE] < size[K0] < size["K = 5"] < size[K20]
    tokens = figures[K20]["tokens/s"] * found[K20].median
    assert rows[K20] == pytest.approx(tokens)  # a row for each token, none for rejected drafts
    assert size["K = 20, fixed-size message"] == rig.FIXED_BYTES
    for name in ("K = 20, naive kernel", "K = 20, objects in dicts"):
        assert size[name] == size[K20]


def test_the_parts_of_the_host_time_are_inside_it(found):
    for row in found.figures.values():
        parts = [row[f"part: {part} us"] for part in plots.PARTS]
        assert min(parts) >= 0
        assert row["host us"] >= max(parts)
        assert row["worker us"] >= row["part: publish us"] > 0


@pytest.mark.fast
def test_the_parts_of_the_host_time_add_up_to_it():
    """Sending goes on while the consumer has the bytes already: it is counted once."""
    span = {"ready": 9_000, "sent": 11_000, "published": 18_000, "dispatch": 4_000}
    table = np.zeros((3, 8), np.int64)  # two steps as they ran, and this one
    table[2, [consumer.RECEIVED, consumer.DECODED, consumer.PROCESSED]] = 15_000, 19_000, 25_000
    found = rig._steps(1.0, np.zeros(2, np.int64), table, 0, [span])
    parts = (found.copy, found.ring, found.decode, found.process)
    assert parts == pytest.approx((2e-6, 4e-6, 4e-6, 6e-6))
    assert sum(parts) == pytest.approx(found.host)
    assert found.output == pytest.approx(13e-6)  # launching the message, and publishing it


def test_targets_of_a_gpu_are_not_measured_here(found):
    verdicts = {target.what: target.verdict for target in found.targets}
    assert sum(what.startswith("H100") for what in verdicts) == 4
    assert all(v == "not measured" for what, v in verdicts.items() if what.startswith("H100"))
    assert verdicts["host part, 64 requests at K = 20"] in ("held", "MISSED")


def test_on_their_machine_the_targets_are_judged(found, monkeypatch):
    assert suite.seconds_to_read(PARAMS, size=1 << 20) > 0
    monkeypatch.setattr(suite, "seconds_to_read", lambda params: found[OFF].median / 1.5)
    figures = {name: {"adds us": 21.0, "host us": 400.0} for name in (K0, K20, ONE)}
    setup = setups.Setup("1B", SETUP.load, 3, 2, 1, targets=True)
    verdicts = [t.verdict for t in suite.targets_of(found, figures, PARAMS, setup)]
    assert verdicts == ["held", "held", "MISSED", "held", "held"]


def test_a_contender_with_other_logprobs_is_caught_before_any_timing(compiled, monkeypatch):
    def wrong(output, *args, widths, process_rank=0):
        return rig.naive_message(
            output._replace(logits=output.logits * 1.01),
            *args,
            widths=widths,
            process_rank=process_rank,
        )

    def never(*_):
        raise AssertionError("timed before all were checked")

    chosen = [one for one in ON_CPU if one.name in (OFF, K20, "K = 20, naive kernel")]
    true_instrumented = rig.instrumented

    def instrumented(compiled, contender, meter):
        result = true_instrumented(compiled, contender, meter)
        if contender.kernel == "naive":
            result.target_message = wrong
        return result

    monkeypatch.setattr(rig, "instrumented", instrumented)
    monkeypatch.setattr(suite, "rotated", never)
    with pytest.raises(BenchError, match="naive kernel: step 0, request 0: token 0: logprobs"):
        suite.measure("a test", SETUP, chosen, PARAMS, MODEL, compiled)


def test_a_run_has_greedy_and_sampled_requests_each_with_a_baseline(compiled, monkeypatch):
    monkeypatch.setattr(suite, "setups", lambda quick: [SETUP])
    monkeypatch.setattr(suite, "Compiled", lambda config: compiled)
    monkeypatch.setattr(suite, "GREEDY", [one for one in ON_CPU if one.name in (OFF, K20)])
    processed = [suite.SAMPLED[0], suite.SAMPLED[-1]]
    monkeypatch.setattr(suite, "SAMPLED", processed)
    greedy, sampled = suite.run(quick=False)
    assert greedy.names == (OFF, K20)
    assert sampled.names == (OFF, "K = 20, processed")
    assert sampled.figures["K = 20, processed"]["rows"] > 0
    assert "sampled" in sampled.title
    assert greedy.targets
    assert not sampled.targets


def small_llama():
    """The GPU's configuration with everything but its structure and dtype made small."""
    config = replace(
        ModelConfig.llama_1b(num_mtp_layers=1),
        vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=32,
    )  # fmt: skip
    return init_params(config, jax.random.key(0)), config


def test_what_a_gpu_will_measure_runs_here_in_small(monkeypatch):
    small = replace(setups.large(quick=False), load=small_llama, steps=2, apart=1, rounds=1)
    names = (OFF, K0, K20, ONE, "K = 20, separate read")
    monkeypatch.setattr(suite, "setups", lambda quick: [small])
    monkeypatch.setattr(suite, "runs_on_gpu", lambda config: True)
    read = partial(suite.seconds_to_read, size=1 << 20)
    monkeypatch.setattr(suite, "seconds_to_read", read)
    monkeypatch.setattr(suite, "GREEDY", [one for one in GREEDY if one.name in names])
    (found,) = suite.run(quick=True)
    assert found.names == names
    assert found.settings["dtype"] == "bfloat16"
    verdicts = {target.what: target.verdict for target in found.targets}
    assert len(verdicts) == 5
    assert {*verdicts.values()} <= {"held", "MISSED"}  # each one has a figure
    added = found.figures[K20]["adds us"]
    wanted = "held" if added <= suite.ADDED_LIMITS[K20] else "MISSED"
    assert verdicts[f"H100: {K20} adds to a step"] == wanted


@pytest.mark.fast
def test_what_a_gpu_will_measure_fits_its_memory():
    model = ModelConfig.llama_1b(num_mtp_layers=1)
    setup = setups.large(quick=False)
    config = setup.loop_config(model)

    def size(make):
        leaves = jax.tree.leaves(jax.eval_shape(make))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    weights = size(lambda: init_params(model, jax.random.key(0)))
    state = size(lambda: init_state(config))
    assert 2.4e9 < weights < 3.0e9
    # Every contender keeps its state and the one that its rounds start in; the working memory of a
    # step, and the arrays of the measured copy, are far less than the rest of 80 GB.
    assert weights + 2 * len(GREEDY) * state < 40e9


def changed(part, **changes):
    """One step of one request."""
    return [{0: replace(part, **changes)}]


# Two tokens, the second one not in its top 2.
PART = content.Part(
    [7, 9],
    [{7: -0.5, 3: -1.0}, {5: -0.25, 3: -2.0, 9: -4.0}],
    [{7: 1}, {9: 30}],
    drafts=1,
)
PLAIN = content.Part([7, 9], [], [])
WRONG = {
    "other tokens": {"ids": [7, 8]},
    "fewer tokens": {"ids": [7]},
    "no logprobs": {"logprobs": [], "ranks": []},
    "one row": {"logprobs": PART.logprobs[:1], "ranks": PART.ranks[:1]},
    "another logprob": {"logprobs": [{7: -0.5, 3: -1.1}, PART.logprobs[1]]},
    "another id": {"logprobs": [{7: -0.5, 4: -1.01}, PART.logprobs[1]]},
    "the emitted token's is missing": {"logprobs": [PART.logprobs[0], {5: -0.25, 3: -2.0}]},
    "fewer logprobs": {"logprobs": [{7: -0.5}, PART.logprobs[1]]},
    "more logprobs": {"logprobs": [PART.logprobs[0] | {1: -1.0, 2: -1.0}, PART.logprobs[1]]},
    "another rank": {"ranks": [{7: 1}, {9: 29}]},
    "no drafts": {"drafts": 0},
}


@pytest.mark.fast
@pytest.mark.parametrize("wrong", WRONG)
def test_whatever_is_not_what_was_asked_for_is_caught(wrong):
    right, plain = changed(PART), changed(PLAIN)
    content.check("t", right, plain, [2], right, drafts=1)
    with pytest.raises(BenchError, match="t: step 0, request 0: "):
        content.check("t", changed(PART, **WRONG[wrong]), plain, [2], right, drafts=1)


@pytest.mark.fast
def test_fewer_logprobs_are_the_first_of_more_and_without_a_request_there_are_none():
    right, plain = changed(PART), changed(PLAIN)
    k0 = changed(PART, logprobs=[{7: -0.5}, {9: -4.0}], drafts=0)
    content.check("t", k0, plain, [0], right)
    k1 = changed(PART, logprobs=[{7: -0.5}, {5: -0.25, 9: -4.0}], drafts=0)
    content.check("t", k1, plain, [1], right)
    content.check("t", plain, plain, [None], right)
    for steps, k in ((k1, 0), (k0, 1), (plain, 0), (k0, None), ([], 0), (2 * k0, 0), ([{}], 0)):
        with pytest.raises(BenchError, match="t"):
            content.check("t", steps, plain, [k], right)


@pytest.mark.fast
def test_a_distribution_that_was_cut_has_fewer_than_k():
    """Processed logprobs: ids of the other columns are -1."""
    half = math.log(0.5)
    part = content._of_lists([7], [[half, half, half, -math.inf]], [[7, 3, -1]], [1])
    assert part.logprobs == [{7: half, 3: half}]
    plain = changed(content.Part([7], [], []))
    content.check("t", changed(part), plain, [3])
    for logprobs in ({7: half}, {7: half, 3: -1.0}):  # something is missing
        with pytest.raises(BenchError, match=f"{len(logprobs)} logprobs, not 3 or 4"):
            content.check("t", changed(part, logprobs=[logprobs]), plain, [3])


@pytest.mark.fast
def test_rounding_is_no_difference_and_changes_the_last_of_two_that_are_close():
    wanted = {7: -0.5, 3: -1.0}
    for row, same in (
        ({7: -0.50005, 3: -1.00005}, True),
        ({7: -0.5, 4: -1.00005}, True),
        ({7: -0.5, 4: -1.01}, False),
        ({8: -0.5, 3: -1.0}, False),
    ):
        assert content.same_row(row, wanted) is same


@pytest.mark.fast
@pytest.mark.parametrize("k", [0, 3])
def test_all_designs_deliver_the_same_content(k):
    data = host.message_bytes(4, k)
    requests = [
        Request(id=str(slot), prompt_token_ids=(1,), params=SamplingParams(logprobs=k))
        for slot in range(4)
    ]
    found = {
        name: content.content_of(design(requests, 4)(data)[1])
        for name, design in consumer.DESIGNS.items()
    }
    ours = found["columns"]
    assert [len(part.logprobs) for part in ours.values()] == [host.TOKENS] * 4
    assert found["lists"] == ours
    for name in ("columns", "lists", "objects"):
        content.check(name, [found[name]], [ours], [k] * 4, [ours])


def test_the_timeline_has_every_part_in_order(compiled):
    begin = time.monotonic_ns()
    recorded, step, operations = timeline.record(SETUP, compiled)
    end = time.monotonic_ns()
    assert all(begin <= s.begin <= s.end <= end for s in recorded)
    by_name = {}
    for span in sorted(recorded, key=lambda span: span.begin):
        by_name.setdefault(span.name, []).append(span)
    order = ["model, verify, draft", "logprobs, pack", "copy", "check and send", "process"]
    # Each step leaves one of each, however long the engine takes: the last belong together.
    for back in range(1, 5):
        last = {name: by_name[name][-back] for name in (*order, "ring", "decode")}
        starts = [last[name].begin for name in order]
        assert starts == sorted(starts)
        # Sending overlaps with the ring; nothing is received before it was sent.
        sending, ring, decode = last["check and send"], last["ring"], last["decode"]
        assert sending.begin <= ring.begin <= ring.end <= decode.begin <= decode.end
        assert decode.end <= last["process"].begin
    assert step[0] in [span.begin for span in by_name["launch and wait"]]
    # jax.profiler has a clock of its own: joined wrongly, its operations would be elsewhere.
    assert operations
    work = by_name["model, verify, draft"][-1]
    assert any(work.begin <= o.begin and o.end <= work.end for o in operations)
    assert all(begin <= o.begin <= o.end <= end for o in operations)


@pytest.mark.fast
def test_a_trace_is_what_perfetto_opens():
    some = [
        spans.Span(spans.WORKER, "copy", 5_000, 9_500),
        spans.Span(spans.RING, "ring", 9_000, 9_000),
    ]
    device = [spans.DeviceEvent("stream 7", "kernel", 1_000, 3_000)]
    events = json.loads(json.dumps(list(spans.trace_events(some, device, first=1_000))))
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == [*spans.TRACKS, spans.OPERATIONS]
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X"}
    for event in complete:
        assert {"name", "pid", "tid", "ts", "dur"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["pid"] in named
    assert [(e["name"], e["ts"], e["dur"]) for e in complete] == [
        ("copy", 4.0, 4.5),
        ("ring", 8.0, 0.0),
        ("kernel", 0.0, 2.0),
    ]
    threads = [e for e in events if e["name"] == "thread_name"]
    assert [e["args"]["name"] for e in threads] == ["stream 7"]


@pytest.mark.fast
def test_no_two_events_of_a_thread_overlap_in_part():
    ring = [(0, 40), (10, 50), (20, 30), (50, 60), (40, 45)]
    some = [spans.Span(spans.RING, "ring", *times) for times in ring]
    events = [e for e in spans.trace_events(some, [], first=0) if e["ph"] == "X"]
    assert len(events) == len(ring)
    assert {e["tid"] for e in events} == {1, 2, 3}
    for thread in (1, 2, 3):
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))


@pytest.mark.fast
def test_rounds_leave_room_for_all_their_tokens():
    shown = [setups.large(False), *setups.setups(quick=True), *setups.setups(quick=False)]
    for setup in (SETUP, *shown):
        most = (setups.DRAFTS + 1) * (rig.WARM_STEPS + setup.steps + setup.apart + 4)
        assert setup.max_length - setups.PROMPT >= most
    texts = setups.prompts(MODEL)
    assert len(texts) == setups.REQUESTS
    assert np.max(texts) < MODEL.vocab_size
