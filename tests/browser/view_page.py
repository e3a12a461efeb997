"""The page of `jax-specdec view` in the system's Chromium: hovering, keys, safety.

Playwright (extra `browser-test`) drives the browser. The file's name keeps it out of the ordinary
test run: `.ci/heavy browser` runs it.
"""

import pytest

from jax_specdec.export.openai import completion
from tests.browser.window import written
from tests.support.hostile_responses import HOSTILE, hostile_response
from tests.support.openai_records import MADE, TABLE, records_of, two_steps
from tests.support.processor_messages import draft, drafts, request, target, tokens


def speculative():
    """Three steps: without drafts, two of three drafts accepted, both accepted."""
    plain = tokens(4, columns=3, logprobs=[[-0.25, -0.25, -2.0]], ranks=[1])
    partly = tokens(
        3, 4, 4, drafts=3, columns=3, ranks=[1, 1, 17],
        logprobs=[[-0.01, -0.01, -5.0], [-0.5, -0.5, -1.0], [-6.5, -0.125, -3.0]],
    )  # fmt: skip
    for slot in (plain, partly):
        slot.topk_ids[:] = [[4, 3], [3, 4], [4, 3], [3, 1]][-len(slot.topk_ids) :]
    both = tokens(3, 3, 4, columns=3)
    both.topk_ids[:] = [[3, 4]] * 3
    return response_of(records_of(
        target(0, plain),
        target(1, partly, draft_follows=True),
        draft(1, drafts(3, 4, 1, columns=3)),
        target(2, both),
        id="poem", logprobs=2, draft_logprobs=True, max_tokens=7,
    ))  # fmt: skip


def response_of(records):
    return completion(records[0].request, records, TABLE, **MADE)


def test_hovering_shows_what_the_token_was(show, tmp_path):
    page = show(written(tmp_path, speculative()))
    assert not page.shown("#panel")
    page.hover(".t", 3)
    page.says("#panel", "recovered token", "logprob \N{MINUS SIGN}6.500", "probability 0.15%")
    page.says("#panel", "token rank 17", "id 4", "Most likely tokens", "88.25%")
    page.says("#panel", "Step 1: 3 drafts proposed, 2 accepted")
    assert page.all("#panel .drafts span", "[x.className, x.innerText]") == [
        ["yes", "\N{MIDDLE DOT}a \N{MINUS SIGN}0.500"],
        ["yes", "b \N{MINUS SIGN}0.625"],
        ["no", "bytes:\\x98 \N{MINUS SIGN}0.250"],
    ]
    assert len(page.all(".t.same", "x.id")) == 3  # the whole step
    page.hover(".t", 0)
    page.says("#panel", "decoded without drafts", "Step 0: no drafts")
    page.hover(".t", 6)
    page.says("#panel", "bonus token")
    page.hover("h1")
    assert not page.shown("#panel")


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
    page.says("#panel", "accepted draft")
    assert page.js("document.activeElement.getAttribute('aria-describedby')") == "panel"
    page.press("Escape")
    assert not page.shown("#panel")


def test_statistics_of_all_of_a_request_and_of_its_steps(show, tmp_path):
    page = show(written(tmp_path, speculative(), response_of(two_steps())))
    page.says("#summary", "2\nrequests", "10\ntokens", "2.00\ntokens a step", "83.3%")
    page.says("#summary", "of 6 drafts accepted", "1: 100%", "3: 0%")
    page.says(".head", "4 / 5 drafts accepted")
    page.click("summary")
    page.wait("article tbody tr:nth-child(3)")
    row = page.all("article tbody tr", "[...x.cells].map(c => c.innerText)")[1]
    assert row == ["1", "3", "2", "3", "\N{MINUS SIGN}2.337", "\N{MIDDLE DOT}a b b"]
    assert len(page.all(".strip i", "x.id")) == 3


def test_invalid_rows_and_parts_of_characters(show, tmp_path):
    page = show(written(tmp_path, response_of(two_steps())))
    page.hover(".t", 2)
    page.says("#panel", "logprob invalid", "token rank none: invalid row", "bytes:\\xe2")
    assert {*page.all(".t", "[...x.classList]")[2]} >= {"t", "px", "rx", "k3", "bytes"}


def test_a_response_without_tokens_and_one_without_logprobs(show, tmp_path):
    empty = completion(request("none", logprobs=1), [], TABLE, **MADE)
    foreign = {"id": "x", "choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}
    page = show(written(tmp_path, empty, foreign))
    assert len(page.all("article", "x.id")) == 2
    page.hover(".t")
    assert page.text("#panel .name") == "hello"
    assert "logprob" not in page.text("#panel")


def test_colors_and_themes(show, tmp_path):
    page = show(written(tmp_path, speculative()))
    by_logprob = page.colors()
    assert by_logprob[1] == "rgba(0, 0, 0, 0)"  # all but certain
    assert by_logprob[3] not in (by_logprob[1], by_logprob[2])
    page.click("input[value=kind]")
    by_kind = page.colors()
    assert by_kind[1] == by_kind[2] != by_kind[3]  # two accepted drafts, one recovered token
    page.click("input[value=rank]")
    by_rank = page.colors()
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
    tokens = page.all(".t", "x.textContent")
    assert len(tokens) == len(HOSTILE)
    assert tokens[0] == page.js("document.title") == HOSTILE[0]
    for at in range(len(HOSTILE)):
        page.hover(".t", at)
        assert page.shown("#panel")
    assert page.all("img, script:not([id]) ~ script:not([id])", "x.id") == []
    assert page.requests == [file.as_uri()]  # nothing else was asked for


def test_the_policy_stops_a_script_that_got_in(show, tmp_path):
    """Two locks: escaping keeps scripts out, and the policy would not run them."""
    file = written(tmp_path, response_of(two_steps()))
    clean = file.read_text(encoding="utf-8")
    smuggled = clean.replace("</body>", "<script>window.ran = 1</script></body>")
    file.write_text(smuggled, encoding="utf-8")
    page = show(file)
    assert page.js("window.ran ?? 0") == 0
    complaint = page.complaints.pop()
    assert "Content Security Policy" in complaint
    # Without the policy it would have run: the check can fail.
    file.write_text(smuggled.replace("Content-Security-Policy", "x"), encoding="utf-8")
    assert show(file).js("window.ran ?? 0") == 1


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_cut_off_on_narrow_and_wide_windows(show, tmp_path, width):
    page = show(written(tmp_path, speculative(), response_of(two_steps())), width=width)
    assert page.js("document.documentElement.scrollWidth") <= width
    page.hover(".t", 6)
    assert page.js("document.getElementById('panel').getBoundingClientRect().right") <= width
    assert len(page.page.screenshot()) > 10_000
