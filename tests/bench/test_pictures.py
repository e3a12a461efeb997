"""Pictures of results: which comparisons a panel shows, and when a picture is up to date."""

import time
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from bench import pictures
from bench.comparison import from_samples
from bench.panels import Bars, Curves, Ratios, panels_of
from bench.progress import rounds_of


def kernel(rows, k, seconds=1e-3):
    shape = f"Shape(rows={rows}, vocabulary=151936, k={k}, dtype='float32')"
    title = f"topk_logprobs R={rows} V=151936 K={k} float32"
    samples = {"log_softmax + top_k": [3 * seconds], "xla": [seconds]}
    return from_samples(title, samples, settings={"shape": shape})


def test_curves_go_along_each_parameter_that_differs():
    comparisons = [kernel(64, k, k + 1) for k in (128, 0, 20)] + [kernel(8, 20)]
    along_k, along_rows = panels_of(comparisons)
    assert isinstance(along_k, Curves)
    assert (along_k.axis, along_k.title) == ("k", "R = 64, V = 151936, float32")
    assert [(point.at, point.median) for point in along_k.lines["xla"]] == [
        (0, 1), (20, 21), (128, 129),
    ]  # fmt: skip
    assert (along_rows.axis, [point.at for point in along_rows.lines["xla"]]) == ("rows", [8, 64])


def test_the_usual_values_are_shown_of_curves_as_long():
    (panel,) = panels_of([kernel(rows, k) for k in (1, 20, 5) for rows in (8, 64)])[1:]
    assert panel.title == "K = 20, V = 151936, float32"


def test_messages_alike_but_for_their_bytes_make_a_curve():
    rings = [
        from_samples(title, {"ring": [1e-5]}, settings={"bytes": size, "gap_s": gap})
        for title, size, gap in (
            ("a step (64 requests, 4,160 bytes), hot", 4160, 1e-4), ("16 KB, hot", 16384, 1e-4),
            ("16 KB, throughput", 16384, 0.0),
        )
    ]  # fmt: skip
    (panel,) = panels_of(rings)
    assert [point.at for point in panel.lines["ring"]] == [4160, 16384]
    assert panel.title == "0.1 ms between messages"


def test_what_has_no_parameter_is_drawn_as_bars():
    (panel,) = panels_of([from_samples("a start", {"cold": [2.0], "kept programs": [1.0]})])
    assert isinstance(panel, Bars)
    assert [point.median for point in panel.points.values()] == [2.0, 1.0]
    not_run = replace(kernel(1, 1), timings=(), notes={"NOT RUN": "no package"})
    assert panels_of([not_run]) == []


def test_functions_of_others_are_drawn_as_ratios():
    samples = {"tunix": [3.0], "the adapter": [2.0]}
    comparisons = [
        from_samples(f"tunix {name} R={rows} V=9 K=0", samples, settings={"shape": shape})
        for name in "abcd"
        for rows in (8, 64)
        if (shape := f"Shape(rows={rows}, vocabulary=9, k=0, dtype='float32')")
    ]
    (panel,) = panels_of(comparisons)
    assert isinstance(panel, Ratios)
    assert panel.lines["tunix a"] == ((8.0, 1.5), (64.0, 1.5))


def test_a_picture_is_up_to_date_until_a_number_changes(tmp_path):
    path = tmp_path / "kernels.svg"
    comparisons = [kernel(64, 0), kernel(64, 20)]
    assert not pictures.is_drawn(path, comparisons)
    assert pictures.draw(path, "kernels", comparisons)
    assert pictures.is_drawn(path, comparisons)
    assert not pictures.is_drawn(path, [kernel(64, 0), kernel(64, 20, 2e-3)])
    first = path.read_bytes()
    assert b"log_softmax + top_k" in first
    pictures.draw(path, "kernels", comparisons)
    assert path.read_bytes() == first
    assert not pictures.draw(path, "kernels", [])


@pytest.mark.parametrize("terminal", [True, False])
def test_rounds_are_drawn_between_them_on_a_terminal(terminal):
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=80)
    drawn_inside = []
    for index in rounds_of("16 KB, hot", 3, console):
        before = out.tell()
        if index == 1:
            time.sleep(0.25)  # a thread that draws would, ten times a second
        drawn_inside.append((index, out.tell() - before))
    assert drawn_inside == [(0, 0), (1, 0), (2, 0)]
    assert out.getvalue().startswith("16 KB, hot\n")
    assert ("3/3" in out.getvalue()) == terminal
    assert terminal or out.getvalue() == "16 KB, hot\n"
