"""What the page draws of many tokens, how one finds a token in them, and two files side by side."""

from tests.browser.window import written
from tests.support.hostile_responses import response


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
    page.says("#panel .name", "29999")
    inside = "(b => b.top >= 0 && b.bottom <= innerHeight && b.left >= 0 && b.right <= innerWidth)"
    assert page.js(f"{inside}(document.getElementById('panel').getBoundingClientRect())")
    # What is far is empty again, and keeps its height.
    page.page.wait_for_selector(".t[data-row='0']", state="detached")
    assert page.js(DRAWN) < 10_000
    page.js("scrollTo(0, 0)")
    page.wait(".t[data-row='0']")


def test_the_next_surprising_token_by_key_and_by_button(show, tmp_path):
    logprobs = [-0.125] * 20_000
    for row in (7, 11_000, 19_999):
        logprobs[row] = -6.0
    tokens = long_text(2000)["choices"][0]["logprobs"]["tokens"]
    parts = [slice(n, n + 5000) for n in range(0, 20_000, 5000)]
    page = show(written(tmp_path, *(response("", tokens[at], logprobs[at]) for at in parts)))
    assert page.text("#surprising") == "3 below \N{MINUS SIGN}4.5"
    visited = []
    for key in ("n", "n", "n", "n", "p", "N"):
        page.press(key)
        visited.append(page.js(FOCUSED))
        page.page.wait_for_timeout(100)  # meanwhile, what is around it is drawn
        assert page.js(f"({SEEN})({visited[-1]})")
        page.says("#panel", "probability 0.25%")
    assert visited == [7, 11_000, 19_999, 7, 19_999, 11_000]
    page.click("#next")
    assert page.js(FOCUSED) == 19_999


def test_search_finds_text_across_tokens(show, tmp_path):
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
    rows = ".t.found", "Number(x.dataset.row) - 10000"
    assert page.all(*rows) == [0, 1, 2, 7, 8]
    assert page.js(f"({SEEN})(10000)")
    assert page.shown("#panel")
    page.press("Enter")
    page.press("Enter")
    assert page.text("#hits") == "1 of 2"  # round the end
    page.press("Shift+Enter")
    assert page.text("#hits") == "2 of 2"
    page.page.fill("#words", "\N{SNOWMAN}")
    page.wait(".t.found[data-row='10004']")
    assert page.all(*rows) == [4, 5, 6]
    page.page.fill("#words", "nowhere")
    page.page.wait_for_selector(".t.found", state="detached")
    assert page.text("#hits") == "0 found"
    page.press("n")  # in the search box it is a letter
    assert page.js("document.getElementById('words').value") == "nowheren"


def test_the_logprobs_of_a_prompt_are_colored(show, tmp_path):
    echoed = response(
        "echo", ["a", "b", "c", "d"], [None, -0.01, -8.0, -1.5],
        usage={"prompt_tokens": 3, "completion_tokens": 1},
    )  # fmt: skip
    page = show(written(tmp_path, echoed))
    colors = page.colors()
    assert colors[1] == "rgba(0, 0, 0, 0)" != colors[2] != colors[3]
    page.hover(".t", 2)
    page.says("#panel", "prompt", "\N{MINUS SIGN}8.000", "token 3")
    page.hover(".t", 0)
    page.says("#panel", "none: nothing comes before it")
    page.hover(".t", 3)
    page.says("#panel", "token 1")
    # The totals are of what was emitted.
    page.says("#summary", "1\ntokens")


def test_two_files_stand_side_by_side_and_show_where_they_differ(show, tmp_path):
    words = ["a", "b", "c", "d"]
    same, changed = response("y", words, [-1.0] * 4), ["a", "b", "e"]
    left = [response("x", words, [-0.5] * 4), same]
    right = [same, response("x", changed, [-0.5, -0.75, -2.0]), response("z", ["f"], [-1.0])]
    page = show(written(tmp_path, *left, beside=right))
    titles = "[...x.children].map(c => c.querySelector('h2')?.textContent ?? null)"
    assert page.all(".pair", titles) == [["x", "x"], ["y", "y"], [None, "z"]]
    tops = ".pair:first-child article", "Math.round(x.getBoundingClientRect().top)"
    left_top, right_top = page.all(*tops)
    assert left_top == right_top
    assert page.all(".t.fork", "x.textContent") == ["c", "e"]
    heads = page.all(".head", "x.innerText")
    assert "0.25 largest difference" in heads[0]
    assert "differs from token 3" in heads[0]
    assert "same tokens" in heads[2]
    page.click("#difference")
    equal, apart, *_ = page.colors()
    assert equal == "rgba(0, 0, 0, 0)" != apart  # by 0.25
    page.hover(".t[data-row='1']")
    page.says("#panel", "in the other file \N{MINUS SIGN}0.750")
    assert page.text("#summary h2") == "left"
    narrow = show(written(tmp_path, *left, beside=right), width=360)
    upper, lower = narrow.all(*tops)
    assert upper < lower
    assert narrow.js("document.documentElement.scrollWidth") <= 360


def test_a_page_whose_data_is_damaged_says_so(show, tmp_path):
    file = written(tmp_path, long_text(1))
    clean = file.read_text(encoding="utf-8")
    begin = clean.index('id="drawn"')
    file.write_text(clean[: begin + 60] + "AAAA" + clean[begin + 64 :], encoding="utf-8")
    page = show(file, ready=".failed")
    page.says(".failed", "The page's data cannot be read")
    assert page.complaints.pop()
