"""What a request of a new kind costs those that stream: the longest times between two chunks.

    python -m tests.heavy.new_kinds_pace [CLIENTS [OVER_MS]]

Clients stream from `jax-specdec serve` with the tiny model; its cache of compiled programs is
empty. They run alone first, which is their pace. Then requests come one after another whose
programs are not there: each waits for them while they are compiled beside the steps. No stream may
wait longer than OVER_MS (50) over its longest time alone. It measures this machine: nothing else
should run there.
"""

import asyncio
import contextlib
import sys
import tempfile
import time

import httpx
import numpy as np

from tests.support.served_process import served

SECONDS = 30  # alone: about as long as a kind takes, since a longer time has a longer longest
KINDS = {
    "logit_bias": {"logit_bias": {"65": 5}},
    "20 token ids": {"logprobs": 1, "extra_token_ids": list(range(20))},
    "a penalty": {"presence_penalty": 0.5},
    "K = 6": {"logprobs": 6},
    "K = 100": {"logprobs": 100},
}


async def stream(http, seed, gaps):
    """Ask again and again; (when, seconds) of each chunk but a request's first in `gaps`."""
    while True:
        body = {
            "prompt": "def f(x):", "max_tokens": 900, "logprobs": 2, "stream": True, "seed": seed,
            "temperature": float(seed % 2), "ignore_eos": True,
        }  # fmt: skip
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            last = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    assert '"error"' not in line, line
                    last, before = time.monotonic(), last
                    if before is not None:
                        gaps.append((last, last - before))


async def measure(url, clients):
    """The gaps of the streams alone, and beside each of the kinds; by name, in seconds."""
    gaps, found = [], {}
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        streams = [asyncio.create_task(stream(http, seed, gaps)) for seed in range(clients)]
        await asyncio.sleep(1)  # what streams need themselves is compiled
        while not gaps or any(gap > 1 for when, gap in gaps[-20 * clients :]):
            await asyncio.sleep(1)
        await asyncio.sleep(5)
        for name, asked in {"alone": None, **KINDS}.items():
            began = time.monotonic()
            if asked is None:
                await asyncio.sleep(SECONDS)
            else:
                body = {"prompt": "a", "max_tokens": 3, **asked}
                (await http.post("/v1/completions", json=body)).raise_for_status()
                await asyncio.sleep(1)
            found[name] = np.array([gap for when, gap in gaps if when >= began])
            print(f"{name}: {len(found[name])} times, {found[name].max() * 1e3:.0f} ms", flush=True)
            assert not any(one.done() for one in streams), streams
            await asyncio.sleep(3)
        for one in streams:
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*streams)
    return found


def main(clients="8", over_ms="50"):
    with (
        tempfile.TemporaryDirectory() as cache,
        served("--slots", "16", "--max-length", "1024", "--compilation-cache", cache) as server,
    ):
        found = asyncio.run(measure(server.url, int(clients)))
    alone = found.pop("alone").max()
    over = {name: (gaps.max() - alone) * 1e3 for name, gaps in found.items()}
    slow = {name: round(ms) for name, ms in over.items() if ms > float(over_ms)}
    assert not slow, f"longer than {over_ms} ms over the longest time alone: {slow}"
    print(f"no stream waited longer than {max(over.values()):.0f} ms over its longest time alone")


if __name__ == "__main__":
    main(*sys.argv[1:])
