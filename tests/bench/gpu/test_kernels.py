"""The GPU benchmark: how it reads a device's timeline, and the limits of each shape."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.gpu import contenders, device_clock, kernels, torch_peers
from bench.gpu.contenders import COPY, FLOOR, FUSED, OURS, PLAIN, TORCH, UNSTABLE
from bench.gpu.device_clock import PAUSE, ClockError, Event, Work
from bench.report.comparison import PEERS, from_samples
from pallas_kernels import TopkLogprobs
from pallas_kernels.testing import plain as reference
from pallas_kernels.testing.shapes import Shape

US = 1e-6


def piece(begin, *kernels):
    """A plug of 300 us and kernels (start, end) in us after it."""
    plug = Event(begin, begin + 300 * US)
    return [plug, *(Event(plug.end + a * US, plug.end + b * US) for a, b in kernels)]


@pytest.mark.fast
def test_spans():
    """Gaps between kernels count, the plug does not, and kernels that overlap count once."""
    events = piece(1.0, (1, 11), (13, 14)) + piece(1.1, (0, 10), (5, 12))
    spans = device_clock.to_spans(reversed(events), 2)
    np.testing.assert_allclose([s.total for s in spans], [14 * US, 12 * US])
    np.testing.assert_allclose([s.busy for s in spans], [11 * US, 12 * US])


@pytest.mark.fast
@pytest.mark.parametrize(
    "events",
    [
        piece(1.0, (1, 2)),  # one piece is missing
        piece(1.0, (1, 2)) + piece(1.1),  # a plug without work
        piece(1.0, (1, 2)) + piece(1.0 + 300 * US + PAUSE / 3, (1, 2)),  # no pause between them
        [],
    ],
)
def test_another_timeline_is_refused(events):
    with pytest.raises(ClockError, match="2 pieces of work were launched"):
        device_clock.to_spans(events, 2)


def test_profiles_are_read(tmp_path):
    """A profile of this machine differs from a GPU's in the plane's name only."""
    call = jax.jit(lambda x: jnp.sort(x) + 1)
    x = jnp.arange(50_000, dtype=jnp.float32)
    jax.block_until_ready(call(x))
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(call(x))
    events = device_clock.read_events(tmp_path, "/host:CPU", "")
    assert max(event.end - event.start for event in events) > 0
    with pytest.raises(ClockError, match="no events on a line 'Stream' of a plane '/device:GPU'"):
        device_clock.read_events(tmp_path, "/device:GPU", "Stream")


def test_no_device_no_times():
    """Without a GPU the device's clock runs the work, and invents no time."""
    calls = []
    work = Work("a", lambda: calls.append("plug"), lambda: calls.append("launch"), lambda _: None)
    with pytest.raises(ClockError, match="plane '/device:GPU'"):
        device_clock.device_spans([work])
    assert calls == ["plug", "launch"]


def test_host_spans():
    """The rehearsal's clock goes through `to_spans` too."""
    calls = []
    work = Work("a", lambda: calls.append("plug"), lambda: calls.append("launch"), lambda _: None)
    spans = device_clock.host_spans([work, work])
    assert calls == ["plug", "launch"] * 2
    assert all(0 <= span.busy <= span.total for span in spans)


def compared(shape, seconds, temporaries=1.0):
    """A comparison with these seconds for each contender, for `targets`."""
    comparison = from_samples("", {name: [value] for name, value in seconds.items()})
    figures = {
        name: {
            "GB/s": kernels.bytes_moved(shape, name) / value / 1e9,
            "temporaries %": temporaries,
        }
        for name, value in seconds.items()
    }
    return dataclasses.replace(comparison, figures=figures)


def verdicts(shape, comparison, ceiling, on_gpu=True):
    found = kernels.targets(shape, comparison, ceiling, on_gpu)
    return {target.what: target.verdict for target in found}


@pytest.mark.fast
def test_targets_of_many_rows():
    """R = 1536 must reach 90 % of the copy's bandwidth; K = 20 has peers as well."""
    shape = Shape(1536, 131_072, 20, "bfloat16")
    seconds = {PLAIN: 1e-2, OURS: 150e-6, FUSED: 150e-6, FLOOR: 140e-6, TORCH[0]: 440e-6}
    memory = {f"memory of {n} beyond outputs, of the logits": "held" for n in (OURS, FUSED)}
    held = {
        "bandwidth over the copy's": "held",  # 2.69 of 2.9 TB/s
        f"speed over {PLAIN}": "held",
        f"speed over {TORCH[0]}": "MISSED",  # 2.93x
        f"speed over {TORCH[1]}": "not measured",
    } | memory
    assert verdicts(shape, compared(shape, seconds), 2900) == held
    assert verdicts(shape, compared(shape, seconds), 3000) == held | {
        "bandwidth over the copy's": "MISSED"
    }
    assert set(verdicts(shape, compared(shape, seconds), 2900, on_gpu=False).values()) == {
        "not measured"
    }
    assert "MISSED" in verdicts(shape, compared(shape, seconds, 3.1), 2900)[next(iter(memory))]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("k", "us", "what", "verdict"),
    [
        (0, 12.4, "time over the floor's", "held"),
        (0, 12.6, "time over the floor's", "MISSED"),
        (20, 21.9, "time beyond the floor's", "held"),
        (20, 22.1, "time beyond the floor's", "MISSED"),
    ],
)
def test_targets_of_64_rows(k, us, what, verdict):
    """The floor is 10 us: K = 0 may take a quarter more, and K = 20 12 us more."""
    shape = Shape(64, 131_072, k, "bfloat16")
    seconds = {PLAIN: 1e-2, OURS: us * US, FUSED: us * US, FLOOR: 10 * US}
    assert verdicts(shape, compared(shape, seconds), 3000)[what] == verdict


def test_no_target_where_none_is_promised():
    shape = Shape(4, 131_072, 64, "float32")
    seconds = {PLAIN: 1e-2, OURS: 1e-3, FUSED: 1e-3, FLOOR: 1e-5}
    assert all(what.startswith("memory") for what in verdicts(shape, compared(shape, seconds), 1))


def test_wrong_answers_are_noticed():
    """A negative control of the comparison before every measurement."""
    x = contenders.random_logits(Shape(3, 300, 5, "float32"), seed=1)
    token_ids = jnp.array([5, 0, 299], jnp.int32)
    good = jax.tree.map(np.asarray, reference.topk_logprobs(x, token_ids, 5))
    # Equal logprobs in another order: only some contenders promise one.
    swapped = np.array(good.token_ids)
    swapped[:, 1:] = swapped[:, :0:-1]
    contenders.check(OURS, good, good)
    contenders.check(TORCH[0], good, good._replace(token_ids=swapped))
    bad: list[TopkLogprobs] = [
        good._replace(token_ids=swapped),
        good._replace(token_ranks=good.token_ranks + 1),
        good._replace(logprobs=good.logprobs + 1e-4),
    ]
    for wrong in bad:
        with pytest.raises(AssertionError):
            contenders.check(OURS, good, wrong)


@pytest.mark.fast
def test_peers_are_known_as_peers():
    """Tables and plots must not count them as this project's own."""
    assert {PLAIN, UNSTABLE, FLOOR, COPY, *TORCH} <= PEERS


def test_missing_peers_say_why(monkeypatch):
    monkeypatch.setattr(torch_peers.importlib, "import_module", _no_module)
    assert torch_peers.obstacle(on_gpu=False) == "torch is not installed"
    assert torch_peers.version() == "not installed"
    assert reference.has_unstable_top_k() == (jax.__version_info__ >= (0, 11))


def _no_module(name):
    raise ImportError(name)
