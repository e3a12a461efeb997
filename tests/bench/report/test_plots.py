"""Plots show the results, and equal results make equal files."""

import pytest

from bench.loop.suite import K20, OFF
from bench.report import plots
from bench.report.comparison import Comparison, from_samples, shape_of


def results() -> list[Comparison]:
    found = []
    for requests in (8, 64, 256):
        for k in (0, 5, 20):
            samples = {"columns (ours)": [1e-4], "lists a token": [requests * (k + 1) * 1e-6]}
            one = from_samples(
                f"bytes to records: {requests} requests, K = {k}",
                samples,
                settings={"requests": requests, "k": k},
                notes={"message bytes": 1000 * requests * (k + 1)},
            )
            figures = {name: {"gc objects": 10.0} for name in samples}
            found.append(Comparison(**{**vars(one), "suite": "host", "figures": figures}))
    for k in (0, 1, 20):
        one = from_samples(
            f"topk_logprobs R=64 V=131072 K={k} float32",
            {"log_softmax + top_k": [0.02], "xla": [0.004]},
            settings={"shape": f"Shape(rows=64, vocabulary=131072, k={k}, dtype='float32')"},
        )
        found.append(Comparison(**{**vars(one), "suite": "kernels"}))
    for rows in (16, 64, 256):
        samples = {"verify, draw and logprobs": [2e-3], "plain JAX sampler": [rows * 1e-3]}
        settings = {"vocabulary": 151_936, "dtype": "bfloat16", "kind": "temperature 1"}
        one = from_samples(
            f"sampling R={rows}", samples, settings={**settings, "rows": rows, "flat": False}
        )
        found.append(Comparison(**{**vars(one), "suite": "sampling"}))
    events = {"ring": [1e-5, 2e-5], "ZeroMQ msgpack": [4e-5, 5e-5]}
    one = from_samples("16 KB, hot", events, events=events)
    found.append(Comparison(**{**vars(one), "suite": "ring"}))
    one = from_samples("decoding", {OFF: [1e-3], K20: [1.1e-3]})
    parts = {f"part: {part} us": 10.0 for part in plots.PARTS}
    figures = {name: {"% of tokens/s": 90.0, "tokens/s": 1e4, **parts} for name in (OFF, K20)}
    found.append(Comparison(**{**vars(one), "suite": "end-to-end", "figures": figures}))
    return found


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return plots.draw(results(), tmp_path_factory.mktemp("plots"))


def test_every_kind_is_drawn_once_and_names_units_and_contenders(drawn):
    texts = {path.stem: path.read_text() for path in drawn}
    assert sorted(texts) == [
        "host-against-k",
        "host-against-requests",
        "host-garbage",
        "kernels-against-k",
        "loop-decoding",
        "loop-host-decoding",
        "message-bytes",
        "ring-16-kb-hot",
        "sampled-rows",
    ]
    for name, words in {
        "host-against-requests": ("ms a step", "requests in the batch", "lists a token"),
        "kernels-against-k": ("ms a step", "V = 131,072", "this project (XLA)"),
        "ring-16-kb-hot": ("us, logarithmic", "ZeroMQ msgpack", "10 us"),
        "loop-decoding": ("tokens/s", "90 %"),
        "loop-host-decoding": ("ms, from the device array", "decode"),
        "message-bytes": ("kB a step", "64 requests", "530 kB"),
        "sampled-rows": ("ms a step", "V = 151,936", "this project", "plain JAX sampler"),
    }.items():
        assert all(word in texts[name] for word in words), name
    assert all(len(text) < 60_000 for text in texts.values())


def test_the_tokens_that_are_left_are_drawn_with_the_spread_of_the_rounds():
    samples = {OFF: [1.0, 1.0, 1.0, 1.0, 2.0], K20: [2.0, 1.25, 1.0, 1.25, 2.0]}
    one = from_samples("decoding", samples)
    figures = {OFF: {"tokens/s": 10.0}, K20: {"% of tokens/s": 80.0}}
    figure = plots.kept(Comparison(**{**vars(one), "figures": figures}))
    (axes,) = figure.axes
    drawn = [tuple(line.get_xdata()) for line in axes.lines]
    assert (80.0, 100.0) in drawn  # of 50, 80, 80, 100, 100 %
    (text,) = [text for text in axes.texts if text.get_text() == "80 %"]
    assert text.xy[0] == 100.0  # behind the line, which it would hide
    assert axes.get_xlim()[1] > 100.0


def test_the_same_results_make_the_same_files(drawn, tmp_path):
    again = plots.draw(results(), tmp_path)
    assert [path.read_bytes() for path in drawn] == [path.read_bytes() for path in again]


def test_without_results_nothing_is_drawn(tmp_path):
    assert plots.draw([], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"shape": "Shape(rows=4, vocabulary=9, k=2, dtype='bfloat16')"},
        {"rows": 4, "vocabulary": 9, "k": 2, "dtype": "bfloat16"},
    ],
)
def test_a_shape_is_read_in_both_forms(settings):
    one = from_samples("t", {"a": [1.0]}, settings=settings)
    assert shape_of(one) == {"rows": 4, "vocabulary": 9, "k": 2, "dtype": "bfloat16"}
