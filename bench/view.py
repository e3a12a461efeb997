"""The page of `jax-specdec view` at size: how long it loads and recolors in a headless Chromium.

    python -m bench.view [--tokens 1000000] [--k 5] [--check]

It needs a Chromium and the extra `browser-test`. The file is made here: responses of 500 tokens
with their top K, ids drawn evenly from 50,000, which compress worse than a model's. Times are
of the wall clock, from the command to open the page: "drawn" once the first texts are on the screen
and the page answers, "all" once each token's top K can be shown too. A recoloring ends with the
second frame after the click. With --check, the exit status is 1 where a limit is missed.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jax_specdec.export import html_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PER_RESPONSE, VOCABULARY, DRAFTS = 500, 50_000, 3
LIMITS = {"load, all": 3.0, "recolor": 0.3}  # seconds, at a million tokens

RECOLOR = """async (by) => {
  const begin = performance.now();
  document.querySelector(`input[value=${by}]`).click();
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return (performance.now() - begin) / 1000;
}"""


def lines(num_tokens: int, k: int) -> Iterator[str]:
    """Yield responses of `num_tokens` tokens in all, as lines of JSON."""
    rng = np.random.default_rng(0)
    letters = rng.integers(97, 123, (VOCABULARY, 6), np.uint8)
    words = [f" {bytes(row).decode()}" + "\n" * (n % 40 == 0) for n, row in enumerate(letters)]
    for index in range(num_tokens // PER_RESPONSE):
        yield json.dumps(_response(rng, words, f"r{index}", k)) + "\n"


def _response(rng: np.random.Generator, words: list[str], name: str, k: int) -> dict[str, Any]:
    n = PER_RESPONSE
    ids = rng.integers(0, VOCABULARY, (n, k))
    logprobs = -np.sort(rng.exponential(size=(n, k)).astype(np.float32), axis=1)
    chosen = np.minimum(rng.geometric(0.6, n), k) - 1
    own, strings = ids[np.arange(n), chosen], np.array(words, object)
    accepted = rng.integers(0, DRAFTS + 1, n)
    ends = np.cumsum(accepted + 1)
    num_steps = int(np.searchsorted(ends, n)) + 1
    accepted[num_steps - 1] -= ends[num_steps - 1] - n
    kinds, steps = [], []
    for step, count in enumerate(accepted[:num_steps].tolist()):
        kinds += ["accepted"] * count + ["bonus" if count == DRAFTS else "recovered"]
        steps.append(
            {"step": step, "num_tokens": count + 1, "num_drafts": DRAFTS, "num_accepted": count}
        )
    return {
        "id": name,
        "model": "m",
        "choices": [{"text": "", "finish_reason": "length", "logprobs": {
            "tokens": strings[own].tolist(),
            "token_logprobs": logprobs[np.arange(n), chosen].tolist(),
            "top_logprobs": [
                dict(zip(row, values, strict=True))
                for row, values in zip(strings[ids].tolist(), logprobs.tolist(), strict=True)
            ],
        }}],
        "speculation": {
            "prompt": "def ", "token_ids": own.tolist(), "token_ranks": (chosen + 1).tolist(),
            "token_kinds": kinds, "by_step": steps,
        },
    }  # fmt: skip


def measure(page: Path, program: str) -> dict[str, float]:
    """Seconds of loading, recoloring and looking for things in a page, by what was done."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": 1280, "height": 900})
        window.set_default_timeout(300_000)
        begin = time.perf_counter()
        window.goto(page.as_uri(), wait_until="commit")
        window.wait_for_selector("body[data-ready]")
        window.wait_for_selector(".t")
        seconds = {"load, drawn": time.perf_counter() - begin}
        window.wait_for_selector("body[data-ready=all]")
        seconds["load, all"] = time.perf_counter() - begin
        seconds["recolor"] = max(window.evaluate(RECOLOR, by) for by in ("rank", "kind", "logprob"))
        begin = time.perf_counter()
        window.keyboard.press("n")
        window.wait_for_selector("#panel:not([hidden])")
        seconds["next surprising token"] = time.perf_counter() - begin
        begin = time.perf_counter()
        window.fill("#words", "ab")
        window.wait_for_selector("#hits:not(:empty)")
        seconds["search"] = time.perf_counter() - begin
        browser.close()
    return seconds


def main(given: list[str] | None = None) -> int:
    """Make the file and its page, print what it takes, and judge it where that is wanted."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.view", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--k", type=int, default=5, metavar="K", help="most likely tokens of each")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(given)
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print("NOT RUN: no Chromium is installed: apt-get install -y chromium", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "big.jsonl"), Path(folder, "big.html")
        with source.open("w") as file:
            file.writelines(lines(options.tokens, options.k))
        begin, cpu = time.perf_counter(), time.process_time()
        with source.open() as file:
            view = html_page.read(file)
        target.write_text(html_page.page(view, "big"))
        made, cpu = time.perf_counter() - begin, time.process_time() - cpu
        print(
            f"{view.num_tokens:,} tokens, K = {options.k}: {source.stat().st_size / 1e6:.0f} MB of "
            f"JSON to a page of {target.stat().st_size / 1e6:.0f} MB in {made:.1f} s, {cpu:.1f} s "
            "of a core"
        )
        seconds = measure(target, program)
    missed = 0
    for name, found in seconds.items():
        limit = LIMITS.get(name)
        said = (
            ""
            if limit is None
            else f" (at most {limit:g} s: {'held' if found <= limit else 'MISSED'})"
        )
        print(f"{name}: {found:.3f} s{said}")
        missed += limit is not None and found > limit
    print(f"load average of the machine: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} cores")
    return int(bool(options.check and missed))


if __name__ == "__main__":
    sys.exit(main())
