"""What a person sees, at every size of a terminal and in a pipe; no test starts a process."""

import functools
import io
import itertools
import re
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from jax_specdec.cli import demo_requests, demo_screen, demo_tables
from jax_specdec.records import output_processor
from jax_specdec.records.batch import FinishReason
from jax_specdec.requests import Request, SamplingParams
from tests.support.processor_messages import draft, drafts, target
from tests.support.processor_messages import tokens as slot
from tests.support.scene import Scene, long_requests


def console(width=80, height=24, terminal=False):
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None
    )


def printed(console):
    return console.file.getvalue()


def collected(*texts, done=(), prompt="p", drafts=3, max_tokens=500):
    """A collector of one request a text: those in `done` have ended, one without text waits."""
    requests = []
    for index, text in enumerate(texts):
        limit = max(len(text), 1) if index in done else max_tokens
        params = SamplingParams(max_tokens=limit, logprobs=index % 21, temperature=0.7)
        requests.append(
            Request(id=f"{index:02d}", prompt_token_ids=(256, *prompt.encode()), params=params)
        )
    collector = demo_requests.Collector.of(requests)
    for request, text in zip(requests, texts, strict=True):
        deliver(collector, request, text.encode() if isinstance(text, str) else text, drafts)
    return collector


def deliver(collector, request, ids, drafts=3):
    """Add records of `ids`; each step emits all that it can with `drafts` drafts."""
    state = output_processor.admit(output_processor.ProcessorState.empty(1), 0, 1, request)
    for step, start in enumerate(range(0, len(ids), drafts + 1)):
        part = ids[start : start + drafts + 1]
        columns = request.params.num_columns
        message = target(step, slot(*part, drafts=drafts, columns=columns))
        state, records = output_processor.step(state, message)
        received = SimpleNamespace(latency_ns=5000, message=message, records=records)
        collector.add(received)


def delivered(scene, requests):
    """A collector of the updates that a scene's engine delivered."""
    collector = demo_requests.Collector.of(requests)
    for update in scene.updates:
        collector.add(update)
    return collector


def view(collector, width, height):
    shown = console(width, height)
    shown.print(demo_screen.LiveView().draw(collector, width, height))
    return printed(shown).splitlines()


@functools.cache
def many_requests():
    """12 requests that are done, 8 that run and 18 that wait; drawing changes none of them."""
    texts = ["some text that is long enough\n" * 9] * 20 + [""] * 18
    return collected(*texts, done=range(12))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("height", [2, 5, 24, 40])
def test_the_live_view_fits_and_always_shows_its_status(width, height):
    lines = view(many_requests(), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert lines[-1].startswith("12 of 38 done, 8 running, 18 waiting"[:width])
    explained = height >= demo_screen.LEGEND_HEIGHT
    if explained:
        assert lines[-2].startswith("colors by logprob:")
    states = [line.split()[1] for line in lines[: -1 - explained]]
    if height < 40:  # the running ones are first, and those that are done only counted
        assert "done" not in states
        assert states[:8] == ["270"] * min(8, height - 1)
        assert states[8:] == ["wait"] * max(0, height - 9 - explained)
        assert len(lines) == min(height, 28)
    else:
        assert states == ["done"] * 12 + ["270"] * 8 + ["wait"] * 18


def test_the_status_says_tokens_a_second_and_acceptance_as_they_change():
    now = [0.0]
    live = demo_screen.LiveView(demo_screen.Rate(lambda: now[0]))
    collector = collected("", "abcdefgh")

    def status():
        shown = console(200, 24)
        shown.print(live.draw(collector, 200, 24))
        return printed(shown).splitlines()[-1]

    assert "tokens/s" not in status()
    assert "100% of drafts accepted" in status()  # deliver() accepts all
    now[0] = 2.0
    deliver(collector, collector.outputs["00"].request, b"x" * 40)
    assert ", 20 tokens/s, " in status()
    now[0] = 4.0
    deliver(collector, collector.outputs["00"].request, b"y" * 8, drafts=1)
    # Over the last three seconds only: 8 tokens since the one before the window's end.
    assert ", 4 tokens/s, " in status()
    output = collector.outputs["00"]
    output.num_drafts += 39
    total = sum(one.num_drafts for one in collector.outputs.values())
    accepted = sum(one.num_accepted for one in collector.outputs.values())
    assert f", {accepted / total:.0%} of drafts accepted, " in status()
    assert accepted < total


def test_accepted_drafts_are_underlined_and_other_tokens_are_not():
    collector = collected("abcdefgh", prompt="p")  # two steps of three drafts and a bonus token
    text = demo_screen.ColoredText(collector.outputs["00"])
    text.update()
    runs = [(part, "underline" in style) for part, style in text.runs]
    merged = [
        ("".join(part for part, _ in group), underlined)
        for underlined, group in itertools.groupby(runs, lambda run: run[1])
    ]
    assert merged == [("p", False), ("abc", True), ("d", False), ("efg", True), ("h", False)]


def test_a_terminal_without_colors_has_no_legend():
    live = demo_screen.LiveView(explain=False)
    shown = console(80, 24)
    shown.print(live.draw(collected("abc"), 80, 24))
    assert "colors by logprob" not in printed(shown)


def test_the_live_view_says_that_a_worker_starts():
    assert view(collected("", ""), 60, 24)[-1].startswith("starting the model worker")
    assert len(view(collected(*[""] * 99), 60, 24)) == 24


@pytest.mark.parametrize("width", [10, 20, 33, 80])
def test_a_line_shows_the_end_of_its_text(width):
    text = demo_screen.ColoredText(collected("first\nsecond\tlast 漢字é end").outputs["00"])
    text.update()
    line = "".join(segment.text for segment in text.tail(width))
    whole = "pfirst⏎second⇥last 漢字é end"
    if cell_len(whole) < width:
        assert line == whole
    else:
        assert line[0] == "…"
        assert whole.endswith(line[1:])
        assert width - 1 <= cell_len(line) <= width  # a wide character may not fit


def test_text_that_grows_equals_text_made_at_once():
    collector = collected("")
    (output,) = collector.outputs.values()
    grown = demo_screen.ColoredText(output)
    ids = "é漢字 [bold] done\n".encode() + b"\xc3"  # split between the bytes of a character
    state = output_processor.admit(output_processor.ProcessorState.empty(1), 0, 1, output.request)
    for step, token in enumerate(ids):
        message = target(step, slot(token, columns=1, logprobs=[[-0.9 * (step % 5)]]))
        state, (record,) = output_processor.step(state, message)
        output.add(record)
        grown.update()
    state, (record,) = output_processor.flush(state, reason=FinishReason.ABORT)
    output.add(record)
    grown.update()
    at_once = demo_screen.ColoredText(output)
    at_once.update()
    assert grown.runs == at_once.runs
    assert grown.whole().plain == "pé漢字 [bold] done\n\ufffd"
    assert len({style for _, style in grown.runs}) > 3
    assert output.token_ids == list(ids)
    assert output.token_logprobs == pytest.approx([-0.9 * (i % 5) for i in range(len(ids))])


def test_a_line_is_made_again_only_when_something_came(monkeypatch):
    collector = collected("abc", "def")
    made = []
    tail = demo_screen.ColoredText.tail
    monkeypatch.setattr(
        demo_screen.ColoredText, "tail", lambda self, width: made.append(1) or tail(self, width)
    )
    live = demo_screen.LiveView()
    live.draw(collector, 80, 24)
    live.draw(collector, 80, 24)
    assert len(made) == 2
    deliver(collector, collector.outputs["00"].request, b"x")
    live.draw(collector, 80, 24)
    assert len(made) == 3
    live.draw(collector, 60, 24)
    assert len(made) == 5


def test_the_screen_is_drawn_ten_times_a_second_at_most(monkeypatch):
    drawn, now = [], [0.0]
    monkeypatch.setattr(demo_screen.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(demo_screen.LiveView, "draw", lambda *_: drawn.append(now[0]) or "")
    with demo_screen.screen(console(terminal=True)) as screen:
        for _ in range(1000):
            screen.update(collected(""))
            now[0] += 0.001
    assert len(drawn) == 10


TEXT = "a text that has an end" * 4


@functools.cache
def ended_requests(drafts):
    return collected(*[TEXT] * 21, done=range(21), drafts=drafts)


@pytest.mark.parametrize("width", [60, 70, 80, 100, 120, 200])
@pytest.mark.parametrize("drafts", [1, 3, 5, 16, 64])
def test_the_table_shows_every_number_at_every_width(width, drafts):
    collector = ended_requests(drafts)
    shown = console(width)
    demo_tables.show(collector, shown)
    table, _ = re.split(r"\d+ messages", printed(shown))
    assert "…" not in table
    lines = [re.findall(r"[^\s│]+", line) for line in table.splitlines()]
    rows = {line[0]: line for line in lines if line}
    assert max(map(len, table.splitlines())) <= width
    for name, output in collector.outputs.items():
        assert rows[name][1] == str(output.request.params.logprobs)
        assert str(len(TEXT)) in rows[name]
        assert rows[name][-1] == f"{output.mean_logprob:.3f}"
    assert str(21 * len(TEXT)) in rows["all"]


def test_a_wide_terminal_shows_more_than_a_narrow_one():
    collector = collected(*["a text"] * 2, done=range(2), drafts=3)
    heads = []
    for width in (200, 70, 40):
        shown = console(width)
        demo_tables.show(collector, shown)
        heads.append(printed(shown))
    assert "drafts accepted" in heads[0]
    assert "mean logprob" in heads[0]
    assert "% accepted" in heads[1]
    assert "% accepted" not in heads[2]
    assert "length" not in heads[2]
    assert "length" in heads[1]


@pytest.mark.parametrize("width", [40, 120])
def test_the_mean_of_the_drafts_logprobs_has_a_column_where_they_were_asked_for(width):
    request = Request(
        id="r",
        prompt_token_ids=(256,),
        params=SamplingParams(max_tokens=3, logprobs=1, draft_logprobs=True),
    )
    state = output_processor.admit(output_processor.ProcessorState.empty(1), 0, 1, request)
    said = target(0, slot(7, 8, 9, columns=2), draft_follows=True)
    state, _ = output_processor.step(state, said)
    _, records = output_processor.step(state, draft(0, drafts(7, 8, columns=2)))
    collector = demo_requests.Collector.of([request])
    collector.add(SimpleNamespace(latency_ns=5000, message=said, records=records))
    shown = console(width)
    demo_tables.show(collector, shown)
    # The logprob of token n is -(n + 1) / 8 in these messages.
    assert "ofdrafts" in "".join(printed(shown).split())
    assert "-1.062" in printed(shown)
    shown = console(120)
    demo_tables.show(collected("abc", done=[0]), shown)
    assert "of drafts" not in printed(shown)


@pytest.mark.parametrize("width", [30, 120])
def test_the_table_of_workers_shows_every_number_at_every_width(width):
    scene = Scene(num_ranks=2, num_prefill_ranks=1)
    scene.run(long_requests(), lambda scene, n: n or scene.engine.preempt("r0"))
    shown = console(width)
    demo_tables.show_workers(scene.engine.status, delivered(scene, long_requests()), shown)
    rows = [re.findall(r"[\w,]+", line) for line in printed(shown).splitlines()]
    rows = [row for row in rows if row and row[0] in "012"]
    sent = [str(worker.sent) for worker in scene.workers]
    assert [row[:3] for row in rows] == [
        [str(rank), role, sent[rank]] for rank, role in enumerate(("decode", "decode", "prefill"))
    ]
    assert sum(int(row[4]) for row in rows) == 6 * 20
    assert [row[5] for row in rows] == ["0", "0", "6"]
    preempted = [rank.processor.preempted for rank in scene.engine.status]
    assert [row[6] for row in rows] == [str(number) for number in preempted]


def test_the_table_of_workers_adds_up_to_the_sentence_before_it():
    """This holds with a replaced worker too, and with messages that no request waited for."""
    requests = long_requests()
    scene = Scene(num_ranks=2, faults={0: [4]}, on_worker_loss="restart", resume_lost=True)
    scene.run(requests)
    collector = delivered(scene, requests)
    for worker in scene.workers:
        worker.sent += 5  # the engine took them out of the ring while it closed
    shown = console(200)
    demo_tables.show(collector, shown)
    messages, size = re.search(r"(\d+) messages, ([\d,]+) bytes", printed(shown)).groups()
    shown = console(200)
    demo_tables.show_workers(scene.engine.status, collector, shown)
    rows = [re.findall(r"[\w,]+", line) for line in printed(shown).splitlines()]
    rows = [row for row in rows if row and row[0] in "01"]
    assert len(rows) == 2
    assert sum(int(row[2]) for row in rows) == int(messages) == len(collector.latencies_ns) > 8
    assert sum(int(row[3].replace(",", "")) for row in rows) == int(size.replace(",", ""))


def test_the_latency_says_what_it_includes():
    shown = console(200)
    demo_tables.show(collected("abc", done=[0]), shown)
    assert "waiting for this process to read included" in printed(shown)
    assert "median 5 us" in printed(shown)


def test_a_pipe_gets_the_text_as_it_is():
    written = "[bold]not markup[/] :smile: " + "word " * 60 + "\n\x1b[2Jend"
    shown = console(40)
    demo_screen.full_texts(collected(written, done=[0], prompt="[red]"), shown)
    assert printed(shown) == f"00: [red]{written}\n".replace("\x1b", "·")
    shown = console(40)
    demo_screen.say("wrote 3 records to a/path/[bold]/that/is/long/and/must/stay/whole", shown)
    assert printed(shown).count("\n") == 1
    assert "[bold]" in printed(shown)


def test_a_terminal_gets_the_same_text():
    shown = console(40, terminal=True)
    demo_screen.full_texts(collected("[bold] " + "word " * 30 + "end", done=[0]), shown)
    assert printed(shown) == "00: p[bold] " + "word " * 30 + "end\n"


def test_a_pipe_is_told_what_is_done_but_not_what_was_lost():
    collector = collected("abc", "abcdef", done=[0])
    output = collector.outputs["01"]
    state = output_processor.ProcessorState.empty(1)
    state = output_processor.admit(state, 0, 1, output.request)
    _, (record,) = output_processor.flush(state, reason=FinishReason.WORKER_LOST)
    output.add(record)
    assert output.finish_reason is FinishReason.WORKER_LOST
    shown = console()
    with demo_screen.screen(shown) as screen:
        screen.update(collector)
        screen.update(collector)
    assert printed(shown) == "request 00 done: 3 tokens (length)\n"
