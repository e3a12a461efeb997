"""Ready means ready: the first request of each kind takes no longer than those that follow it.

    python -m tests.heavy.first_requests [OVER]

Requests come to `jax-specdec serve` with the tiny model, one after another, as soon as it says that
it is ready: of each kind one, then more with its seed, which do the same work. There are five such
starts, the first with an empty cache of compiled programs. The first request may take OVER times
(1.3) as long as the median of the others, in the median of the starts: a request is a tenth of a
second, which anything else on the machine doubles. Nothing else should run there.
"""

import statistics
import sys
import tempfile
import time

import httpx

from tests.support.served_process import served

STARTS, OTHERS = 5, 5
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False
JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
KINDS = {
    "greedy": {"temperature": 0},
    "greedy, K = 20": {"temperature": 0, "logprobs": 20},
    "sampled": {},
    "sampled, K = 5, top-p": {"logprobs": 5, "top_p": 0.9},
    "16 token ids": {"logprobs": 1, "extra_token_ids": list(range(16))},
    "300 biases": {"logit_bias": {str(id): 1 for id in range(257)}},
    "a penalty": {"presence_penalty": 0.5},
    "min_tokens": {"min_tokens": 8},
    "echo": {"echo": True, "logprobs": 5},
    "a structure": {"response_format": JSON},
    "a structure and a penalty": {"response_format": JSON, "frequency_penalty": 0.3},
    "a regular expression": {"structured_outputs": {"regex": "[a-f]{12}"}},
}
CHAT = {"tools": [TOOL], "tool_choice": "required"}


def seconds(http, path, body):
    began = time.perf_counter()
    answer = http.post(path, json=body)
    took = time.perf_counter() - began
    assert answer.is_success, answer.text
    return took


def first_and_others(cache, asked):
    """Of each kind, the seconds of a server's first request and the median of those behind it."""
    with (
        served("--max-length", "1024", "--compilation-cache", cache) as server,
        httpx.Client(base_url=server.url, timeout=600) as http,
    ):
        for name, (path, body) in asked.items():
            first, *others = [seconds(http, path, body) for _ in range(1 + OTHERS)]
            yield name, first, statistics.median(others)


def main(over="1.3"):
    text = {"prompt": "def f(x):\n", "max_tokens": 64, "seed": 3}
    asked = {name: ("/v1/completions", text | kind) for name, kind in KINDS.items()}
    chat = {"messages": [{"role": "user", "content": "call f"}], "max_tokens": 64, "seed": 3}
    asked["a tool"] = ("/v1/chat/completions", chat | CHAT)
    ratios = {name: [] for name in asked}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(STARTS):
            for name, first, others in first_and_others(cache, asked):
                ratios[name].append(first / others)
                print(f"{name}: {first * 1e3:.0f} ms, then {others * 1e3:.0f} ms, "
                      f"{first / others:.2f}x", flush=True)  # fmt: skip
    medians = {name: round(statistics.median(of_kind), 2) for name, of_kind in ratios.items()}
    print(f"the medians of {STARTS} starts: {medians}")
    slow = {name: ratio for name, ratio in medians.items() if ratio > float(over)}
    assert not slow, f"the first took more than {over} times as long: {slow}"


if __name__ == "__main__":
    main(*sys.argv[1:])
