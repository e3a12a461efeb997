"""The page of `jax-specdec view` in the system's Chromium: hovering, keys, safety.

Playwright (extra `browser-test`) drives the browser. The file's name keeps it out of the ordinary
test run: `.ci/heavy browser` runs it.
"""

import pytest

from jax_specdec.export.openai import completion
from jax_specdec.records.output_processor import ProcessorState, admit, step
from tests.browser.window import written
from tests.support.hostile_responses import HOSTILE, hostile_response
from tests.support.openai_records import MADE, TABLE, two_steps
from tests.support.processor_messages import draft, drafts, request, target, tokens


def speculative():
    """Three steps: without drafts, two of three drafts accepted, both accepted."""
    state = ProcessorState.empty(1)
    state = admit(state, 0, 1, request("poem", logprobs=2, draft_logprobs=True, max_tokens=7))
    plain = tokens(4, columns=3, logprobs=[[-0.25, -0.25, -2.0]], ranks=[1])
    partly = tokens(
        3, 4, 4, drafts=3, columns=3, ranks=[1, 1, 17],
        logprobs=[[-0.01, -0.01, -5.0], [-0.5, -0.5, -1.0], [-6.5, -0.125, -3.0]],
    )  # fmt: skip
    for slot in (plain, partly):
        slot.topk_ids[:] = [[4, 3], [3, 4], [4, 3], [3, 1]][-len(slot.topk_ids) :]
    both = tokens(3, 3, 4, columns=3)
    both.topk_ids[:] = [[3, 4]] * 3
    records = []
    for message in (
        target(0, plain),
        target(1, partly, draft_follows=True),
        draft(1, drafts(3, 4, 1, columns=3)),
        target(2, both),
    ):
        state, released = step(state, message)
        records += released
    return completion(records[0].request, records, TABLE, **MADE)


def test_hovering_shows_what_the_token_was(show, tmp_path):
    page = show(written(tmp_path, speculative()))
    assert not page.shown("#panel")
    page.hover(".t", 3)
    panel = page.text("#panel")
    for said in ("recovered token", "logprob \N{MINUS SIGN}6.500", "probability 0.15%",
                 "token rank 17", "id 4", "Most likely tokens", "88.25%",
                 "Step 1: 3 drafts proposed, 2 accepted"):  # fmt: skip
        assert said in panel
    chips = (
        "[...document.querySelectorAll('#panel .drafts span')].map(c => [c.className, c.innerText])"
    )
    assert page.js(chips) == [
        ["yes", "\N{MIDDLE DOT}a \N{MINUS SIGN}0.500"],
        ["yes", "b \N{MINUS SIGN}0.625"],
        ["no", "bytes:\\x98 \N{MINUS SIGN}0.250"],
    ]
    assert page.js("document.querySelectorAll('.t.same').length") == 3  # the whole step
    page.hover(".t", 0)
    assert "decoded without drafts" in page.text("#panel")
    assert "Step 0: no drafts" in page.text("#panel")
    page.hover(".t", 6)
    assert "bonus token" in page.text("#panel")
    page.hover("h1")
    assert not page.shown("#panel")
    assert page.complaints == []


def test_the_keyboard_reaches_every_token(show, tmp_path):
    page = show(written(tmp_path, speculative()))
    for _ in range(12):
        page.press("Tab")
        if page.js("document.activeElement.classList.contains('t')"):
            break
    current = "document.activeElement.dataset.row"
    assert page.js(current) == "0"
    assert page.shown("#panel")
    places = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "End", "ArrowRight", "Home", "ArrowDown"):
        page.press(key)
        places.append(page.js(current))
    assert places == ["1", "2", "1", "6", "6", "0", "1"]
    assert "accepted draft" in page.text("#panel")
    assert page.js("document.activeElement.getAttribute('aria-describedby')") == "panel"
    page.press("Escape")
    assert not page.shown("#panel")


def test_statistics_of_all_of_a_request_and_of_its_steps(show, tmp_path):
    page = show(written(tmp_path, speculative(), two_steps_response()))
    summary = page.text("#summary")
    for said in ("2\nrequests", "10\ntokens", "2.00\ntokens a step", "83.3%",
                 "of 6 drafts accepted", "1: 100%", "3: 0%"):  # fmt: skip
        assert said in summary.replace("\n\n", "\n"), summary
    assert "4 / 5 drafts accepted" in page.text(".head")
    page.click("summary")
    page.wait("article tbody tr:nth-child(3)")
    row = page.js(
        "[...document.querySelectorAll('article tbody tr')[1].cells].map(c => c.innerText)"
    )
    assert row == ["1", "3", "2", "3", "\N{MINUS SIGN}2.337", "\N{MIDDLE DOT}a b b"]
    assert page.js("document.querySelectorAll('.strip i').length") == 3


def two_steps_response():
    """An invalid row, a masked token and a part of a character."""
    records = two_steps()
    return completion(records[0].request, records, TABLE, **MADE)


def test_invalid_rows_and_parts_of_characters(show, tmp_path):
    page = show(written(tmp_path, two_steps_response()))
    page.hover(".t", 2)
    for said in ("logprob invalid", "token rank none: invalid row", "bytes:\\xe2"):
        assert said in page.text("#panel")
    classes = page.js("[...document.querySelectorAll('.t')[2].classList]")
    assert {*classes} >= {"t", "px", "rx", "k3", "bytes"}
    assert page.complaints == []


def test_a_response_without_tokens_and_one_without_logprobs(show, tmp_path):
    empty = completion(request("none", logprobs=1), [], TABLE, **MADE)
    foreign = {"id": "x", "choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}
    page = show(written(tmp_path, empty, foreign))
    assert page.js("document.querySelectorAll('article').length") == 2
    page.hover(".t")
    assert page.text("#panel .name") == "hello"
    assert "logprob" not in page.text("#panel")
    assert page.complaints == []


def test_colors_and_themes(show, tmp_path):
    page = show(written(tmp_path, speculative()))
    colors = "[...document.querySelectorAll('.t')].map(t => getComputedStyle(t).backgroundColor)"
    by_logprob = page.js(colors)
    assert by_logprob[1] == "rgba(0, 0, 0, 0)"  # all but certain
    assert by_logprob[3] not in (by_logprob[1], by_logprob[2])
    page.click("input[value=kind]")
    by_kind = page.js(colors)
    assert by_kind[1] == by_kind[2] != by_kind[3]  # two accepted drafts, one recovered token
    page.click("input[value=rank]")
    by_rank = page.js(colors)
    assert by_rank[1] == by_rank[2] == "rgba(0, 0, 0, 0)" != by_rank[3]
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.js(back)
    page.click("#theme")
    dark = page.js(back)
    assert light != dark
    assert page.text("#theme") == "Light"
    assert show(written(tmp_path, speculative()), scheme="dark").js(back) == dark


def test_what_tokens_say_stays_text(show, tmp_path):
    file = written(tmp_path, hostile_response(), title=HOSTILE[0])
    page = show(file)
    assert page.js("document.querySelectorAll('.t').length") == len(HOSTILE)
    first = "document.querySelectorAll('.t')[0].textContent"
    assert page.js(first) == HOSTILE[0]
    assert page.js("document.title") == HOSTILE[0]
    for at in range(len(HOSTILE)):
        page.hover(".t", at)
        assert page.shown("#panel")
    assert (
        page.js("document.querySelectorAll('img, script:not([id]) ~ script:not([id])').length") == 0
    )
    assert page.complaints == []
    assert page.requests == [file.as_uri()]  # nothing else was asked for


def test_the_policy_stops_a_script_that_got_in(show, tmp_path):
    """Two locks: escaping keeps scripts out, and the policy would not run them."""
    file = written(tmp_path, two_steps_response())
    clean = file.read_text(encoding="utf-8")
    smuggled = clean.replace("</body>", "<script>window.ran = 1</script></body>")
    file.write_text(smuggled, encoding="utf-8")
    page = show(file)
    assert page.js("window.ran ?? 0") == 0
    (complaint,) = page.complaints
    assert "Content Security Policy" in complaint
    # Without the policy it would have run: the check can fail.
    file.write_text(smuggled.replace("Content-Security-Policy", "x"), encoding="utf-8")
    assert show(file).js("window.ran ?? 0") == 1


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_cut_off_on_narrow_and_wide_windows(show, tmp_path, width):
    page = show(written(tmp_path, speculative(), two_steps_response()), width=width)
    assert page.js("document.documentElement.scrollWidth") <= width
    page.hover(".t", 6)
    assert page.js("document.getElementById('panel').getBoundingClientRect().right") <= width
    page.screenshot(tmp_path / f"{width}.png")
    assert (tmp_path / f"{width}.png").stat().st_size > 10_000
