"""The loop's benchmark: all contenders do equal work, and a wrong one is caught."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from bench.loop import consumer, rig, setups, suite
from bench.loop.suite import GREEDY, K0, K20, OFF, ONE
from bench.timing import BenchError
from ipc import wire
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import init_state
from jax_specdec.device.model.params import init_params
from tests.support import quick_compile
from tests.support.random_params import random_params

MODEL = ModelConfig.tiny(vocab_size=64)
SETUP = setups.Setup("a test's model", lambda: (random_params(MODEL), MODEL), 3, 2, 1, requests=16)
ON_CPU = [one for one in GREEDY if one.kernel != "separate"]


@pytest.fixture(scope="module")
def params():
    return random_params(MODEL)


def quickly(config):
    """The loop's functions; compiling costs most here, and how well is not what is tested."""
    with quick_compile.everything():
        return Compiled(config)


@pytest.fixture(scope="module")
def compiled():
    return quickly(SETUP.loop_config(MODEL))


@pytest.fixture(scope="module")
def found(params, compiled):
    """One round of every contender."""
    return suite.measure("a test", SETUP, ON_CPU, params, MODEL, compiled)


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
    assert rows[ONE] < rows[K20] / 8  # of 16 requests
    tokens = figures[K20]["tokens/s"] * found[K20].median
    assert rows[K20] == pytest.approx(tokens)  # a row for each token, none for rejected drafts
    assert size[OFF] < size[K0] < size["K = 5"] < size[K20]
    always = wire.HEADER_WORDS + SETUP.requests * wire.SLOT_WORDS + tokens
    for name, k in ((OFF, 0), (K0, 0), ("K = 5", 5), (K20, 20), (ONE, 20)):
        words = always + rows[name] * 2 * (k + 1)
        assert size[name] == pytest.approx(wire.WORD_BYTES * words), name
    assert size["K = 20, fixed-size message"] == rig.FIXED_BYTES
    for name in ("K = 20, naive kernel", "K = 20, objects in dicts"):
        assert size[name] == size[K20]


def test_the_parts_of_the_host_time_are_inside_it(found):
    for row in found.figures.values():
        parts = [row[f"part: {part} us"] for part in ("copy", "ring", "decode", "process")]
        assert min(parts) >= 0
        assert row["host us"] >= max(parts)
        assert row["worker us"] >= row["part: publish us"] > 0


@pytest.mark.fast
def test_the_parts_of_the_host_time_add_up_to_it():
    """Sending goes on after the consumer has the bytes: that time is counted once."""
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


def test_on_their_machine_the_targets_are_judged(found, params, monkeypatch):
    assert suite.seconds_to_read(params, size=1 << 20) > 0
    monkeypatch.setattr(suite, "seconds_to_read", lambda params: found[OFF].median / 1.5)
    figures = {name: {"adds us": 21.0, "host us": 400.0} for name in (K0, K20, ONE)}
    setup = replace(SETUP, name="1B", targets=True)
    verdicts = [t.verdict for t in suite.targets_of(found, figures, params, setup)]
    assert verdicts == ["held", "held", "MISSED", "held", "held"]


def test_a_contender_with_other_logprobs_is_caught_before_any_timing(params, compiled, monkeypatch):
    def wrong(output, *args, **options):
        return rig.naive_message(output._replace(logits=output.logits * 1.01), *args, **options)

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
        suite.measure("a test", SETUP, chosen, params, MODEL, compiled)


def test_a_run_has_greedy_and_sampled_requests_each_with_a_baseline(compiled, monkeypatch):
    monkeypatch.setattr(suite, "setups", lambda quick: [SETUP])
    monkeypatch.setattr(suite, "Compiled", lambda config: compiled)
    monkeypatch.setattr(suite, "GREEDY", [one for one in ON_CPU if one.name in (OFF, K20)])
    processed = [suite.SAMPLED[0], suite.SAMPLED[-1]]
    monkeypatch.setattr(suite, "SAMPLED", processed)
    greedy, sampled = suite.run(quick=False)
    assert greedy.names == (OFF, K20)
    assert sampled.names == (OFF, "K = 20, processed", "greedy, no logprobs")
    assert sampled.figures["K = 20, processed"]["rows"] > 0
    of_greedy = [sampled.figures[name][suite.OF_GREEDY] for name in sampled.names]
    assert of_greedy[-1] == 100 != of_greedy[0] > 0
    assert "sampled" in sampled.title
    assert greedy.targets
    assert not sampled.targets


def small_llama():
    """The GPU's configuration, small in everything but structure and dtype."""
    config = replace(
        ModelConfig.llama_1b(num_mtp_layers=1),
        vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=32,
    )  # fmt: skip
    return random_params(config), config


@pytest.mark.slow
def test_what_a_gpu_will_measure_runs_here_in_small(monkeypatch):
    """Programs of its own, of which the fused ones have cheap tests beside the loop's."""
    small = replace(
        setups.large(quick=False), load=small_llama, steps=2, apart=1, rounds=1, requests=8
    )
    names = (OFF, K0, K20, ONE, "K = 20, separate read")
    monkeypatch.setattr(suite, "setups", lambda quick: [small])
    monkeypatch.setattr(suite, "Compiled", quickly)
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


@pytest.mark.fast
def test_rounds_leave_room_for_all_their_tokens():
    shown = [setups.large(False), *setups.setups(quick=True), *setups.setups(quick=False)]
    for setup in (SETUP, *shown):
        most = (setups.DRAFTS + 1) * (rig.WARM_STEPS + setup.steps + setup.apart + 4)
        assert setup.max_length - setups.PROMPT >= most
    texts = setups.large(False).prompts(MODEL)
    assert len(texts) == setups.REQUESTS
    assert np.max(texts) < MODEL.vocab_size
