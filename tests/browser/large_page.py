"""What the page draws of many tokens, how one finds a token in them, and two files side by side."""

import json

from tests.browser.window import written


def response(name, tokens, logprobs, **more):
    """A response of a server without the extension."""
    found = {"tokens": tokens, "token_logprobs": logprobs}
    choice = {"text": "".join(tokens), "finish_reason": "stop", "logprobs": found}
    return {"id": name, "choices": [choice], **more}


def long_text(lines):
    """A response of `lines` lines of ten tokens, each of which says its number."""
    tokens = [f" {n}" + ("\n" if n % 10 == 9 else "") for n in range(10 * lines)]
    return response("long", tokens, [-0.125] * len(tokens))


DRAWN = "document.querySelectorAll('.t').length"
SEEN = (
    "row => { const box = document.querySelector(`.t[data-row='${row}']`).getBoundingClientRect();"
    "return box.top > document.getElementById('header').offsetHeight && box.bottom < innerHeight; }"
)
FOCUSED = "Number(document.activeElement.dataset.row)"


def test_only_what_is_near_is_drawn(show, tmp_path):
    page = show(written(tmp_path, long_text(3000)))
    assert 300 < page.js(DRAWN) < 10_000
    assert page.js("document.querySelector('.t[data-row=\"29999\"]')") is None
    page.js("scrollTo(0, document.body.scrollHeight)")
    page.wait(".t[data-row='29999']")
    page.hover(".t[data-row='29999']")
    assert "29999" in page.text("#panel .name")
    inside = "(b => b.top >= 0 && b.bottom <= innerHeight && b.left >= 0 && b.right <= innerWidth)"
    assert page.js(f"{inside}(document.getElementById('panel').getBoundingClientRect())")
    # What is far is empty again, and keeps its height.
    page.page.wait_for_selector(".t[data-row='0']", state="detached")
    assert page.js(DRAWN) < 10_000
    page.js("scrollTo(0, 0)")
    page.wait(".t[data-row='0']")
    assert page.complaints == []


def test_the_next_surprising_token_by_key_and_by_button(show, tmp_path):
    logprobs = [-0.125] * 20_000
    for row in (7, 11_000, 19_999):
        logprobs[row] = -6.0
    tokens = [f" {n}" + ("\n" if n % 10 == 9 else "") for n in range(20_000)]
    page = show(written(tmp_path, *(
        response(str(n), tokens[5000 * n : 5000 * n + 5000], logprobs[5000 * n : 5000 * n + 5000])
        for n in range(4)
    )))  # fmt: skip
    assert page.text("#surprising") == "3 below \N{MINUS SIGN}4.5"
    visited = []
    for key in ("n", "n", "n", "n", "p", "N"):
        page.press(key)
        visited.append(page.js(FOCUSED))
        page.page.wait_for_timeout(100)  # meanwhile, what is around it is drawn
        assert page.js(f"({SEEN})({visited[-1]})")
        assert "probability 0.25%" in page.text("#panel")
    assert visited == [7, 11_000, 19_999, 7, 19_999, 11_000]
    page.click("#next")
    assert page.js(FOCUSED) == 19_999
    assert page.complaints == []


def test_search_goes_over_tokens_and_characters_that_several_tokens_share(show, tmp_path):
    tokens = [" de", "f ma", "in", "\n", "\\xe2", "\\x98", "\\x83", " DEF Mai", "n"]
    entries = [{"token": token, "logprob": -0.5, "top_logprobs": []} for token in tokens]
    chat = {"id": "chat", "choices": [{"message": {"content": ""}, "finish_reason": "stop",
            "logprobs": {"content": entries}}]}  # fmt: skip
    page = show(written(tmp_path, long_text(1000), chat))
    page.press("/")
    page.page.keyboard.type("def main")
    page.wait("#hits:not(:empty)")
    assert page.text("#hits") == "2 found"
    page.press("Enter")
    assert page.text("#hits") == "1 of 2"
    rows = "[...document.querySelectorAll('.t.found')].map(t => Number(t.dataset.row) - 10000)"
    assert page.js(rows) == [0, 1, 2, 7, 8]
    assert page.js(f"({SEEN})(10000)")
    assert page.shown("#panel")
    page.press("Enter")
    page.press("Enter")
    assert page.text("#hits") == "1 of 2"  # round the end
    page.press("Shift+Enter")
    assert page.text("#hits") == "2 of 2"
    page.page.fill("#words", "\N{SNOWMAN}")
    page.wait(".t.found[data-row='10004']")
    assert page.js(rows) == [4, 5, 6]
    page.page.fill("#words", "nowhere")
    page.page.wait_for_selector(".t.found", state="detached")
    assert page.text("#hits") == "0 found"
    page.press("n")  # in the search box it is a letter
    assert page.js("document.getElementById('words').value") == "nowheren"
    assert page.complaints == []


def test_the_logprobs_of_a_prompt_are_colored(show, tmp_path):
    echoed = response(
        "echo", ["a", "b", "c", "d"], [None, -0.01, -8.0, -1.5],
        usage={"prompt_tokens": 3, "completion_tokens": 1},
    )  # fmt: skip
    page = show(written(tmp_path, echoed))
    colors = page.js(
        "[...document.querySelectorAll('.t')].map(t => getComputedStyle(t).backgroundColor)"
    )
    assert colors[1] == "rgba(0, 0, 0, 0)" != colors[2] != colors[3]
    page.hover(".t", 2)
    for said in ("prompt", "\N{MINUS SIGN}8.000", "token 3"):
        assert said in page.text("#panel")
    page.hover(".t", 0)
    assert "none: nothing comes before it" in page.text("#panel")
    page.hover(".t", 3)
    assert "token 1" in page.text("#panel")
    # The totals are of what was emitted.
    assert "1\ntokens" in page.text("#summary").replace("\n\n", "\n")


def test_two_files_stand_side_by_side_and_show_where_they_differ(show, tmp_path):
    words = ["a", "b", "c", "d"]
    left = [response("x", words, [-0.5, -0.5, -0.5, -0.5]), response("y", words, [-1.0] * 4)]
    right = [
        response("y", words, [-1.0] * 4),
        response("x", ["a", "b", "e"], [-0.5, -0.75, -2.0]),
        response("z", ["f"], [-1.0]),
    ]
    page = show(written(tmp_path, *left, beside=right))
    sides = page.js("[...document.querySelectorAll('.pair')].map(p => [...p.children].map("
                    "c => c.querySelector('h2')?.textContent ?? null))")  # fmt: skip
    assert sides == [["x", "x"], ["y", "y"], [None, "z"]]
    tops = page.js("[...document.querySelectorAll('.pair:first-child article')].map("
                   "a => Math.round(a.getBoundingClientRect().top))")  # fmt: skip
    assert tops[0] == tops[1]
    forks = page.js("[...document.querySelectorAll('.t.fork')].map(t => t.textContent)")
    assert forks == ["c", "e"]
    heads = page.js("[...document.querySelectorAll('.head')].map(h => h.innerText)")
    assert "0.25 largest difference" in heads[0]
    assert "differs from token 3" in heads[0]
    assert "same tokens" in heads[2]
    page.click("#difference")
    color = (
        "row => getComputedStyle(document.querySelector(`.t[data-row='${row}']`)).backgroundColor"
    )
    assert page.js(f"({color})(0)") == "rgba(0, 0, 0, 0)"  # equal
    assert page.js(f"({color})(1)") != "rgba(0, 0, 0, 0)"  # 0.25 apart
    page.hover(".t[data-row='1']")
    assert "in the other file \N{MINUS SIGN}0.750" in page.text("#panel")
    assert page.text("#summary h2") == "left"
    narrow = show(written(tmp_path, *left, beside=right), width=360)
    tops = narrow.js("[...document.querySelectorAll('.pair:first-child article')].map("
                     "a => a.getBoundingClientRect().top)")  # fmt: skip
    assert tops[0] < tops[1]
    assert narrow.js("document.documentElement.scrollWidth") <= 360
    assert page.complaints == narrow.complaints == []


def test_a_page_whose_data_is_damaged_says_so(show, tmp_path):
    file = written(tmp_path, json.loads(json.dumps(long_text(1))))
    clean = file.read_text(encoding="utf-8")
    begin = clean.index('id="drawn"')
    file.write_text(clean[: begin + 60] + "AAAA" + clean[begin + 64 :], encoding="utf-8")
    page = show(file, ready=".failed")
    assert "The page's data cannot be read" in page.text(".failed")
