"""What strangers' grammars cost those that stream: time between two chunks, and memory.

    python -m tests.heavy.grammars_beside_streams [CLIENTS [OVER_MS [MOST_MIB]]]

Clients stream from `jax-specdec serve` with the tiny model. They run alone first. Then six grammars
are asked for together, several times: ones that are refused at once (multiples of large numbers),
that go beyond their limits, and that pass and take long. No stream may wait longer than OVER_MS
(50) over its longest time alone, the server and its worker may grow by MOST_MIB (200), and plain
requests are answered meanwhile. It measures this machine: nothing else should run there.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from tests.support.processes import children_of
from tests.support.served_process import served

SECONDS, ROUNDS = 20, 1


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


def keys(factors):
    """A schema of some keys, whose numbers are multiples of large ones; few factors cost little."""
    names = {f"k{n}": {"type": "integer", "multipleOf": n} for n in factors}
    return {"type": "object", "properties": names}


def schemas(number):
    """Six of a round; each round has others, as answers are known."""
    odd = [2 * n + 1 + 12 * number for n in range(6)]
    return {
        "refused at once": [{"type": "integer", "multipleOf": 499_979 + n} for n in odd],
        "beyond their limits": [keys([n << 20, n << 21]) for n in odd],
        "that pass": [keys([16_381 - n - 1]) for n in odd],
    }


def memory(server):
    """MiB of the server and its children."""
    total = 0
    for pid in (server.process.pid, *children_of(server.process.pid)):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text()
            total += int(text.partition("VmRSS:")[2].split()[0]) >> 10
    return total


async def ask(http, **body):
    began = time.monotonic()
    answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3} | body)
    return answer.status_code, time.monotonic() - began


async def measure(server, clients):
    """Longest gaps, in seconds by name; the slowest plain request; MiB before and after."""
    gaps, found, plain = [], {}, []
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as http:
        streams = [asyncio.create_task(stream(http, seed, gaps)) for seed in range(clients)]
        small = {"structured_outputs": {"regex": "[ab]{3}"}}
        assert (await ask(http, **small))[0] == 200  # programs, and the process that compiles
        await asyncio.sleep(10)
        before = memory(server)
        began = time.monotonic()
        await asyncio.sleep(SECONDS)
        found["alone"] = [gap for when, gap in gaps if when >= began]
        for number in range(ROUNDS):
            for name, asked in schemas(number).items():
                began = time.monotonic()
                bodies = [{"structured_outputs": {"json": one}} for one in asked]
                hostile = [asyncio.create_task(ask(http, **body)) for body in bodies]
                while not all(one.done() for one in hostile):
                    plain.append(await ask(http))
                    await asyncio.sleep(0.2)
                answers = [one.result() for one in hostile]
                wanted = 200 if name == "that pass" else 400
                assert {status for status, _ in answers} == {wanted}, (name, answers)
                await asyncio.sleep(1)
                found.setdefault(name, []).extend(gap for when, gap in gaps if when >= began)
                print(f"{name}: answered in {max(s for _, s in answers):.2f} s at most", flush=True)
        assert not any(one.done() for one in streams), streams
        after = memory(server)
        for one in streams:
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*streams)
    assert {status for status, _ in plain} == {200}
    return found, max(seconds for _, seconds in plain), before, after


def main(clients="8", over_ms="50", most_mib="200"):
    with (
        tempfile.TemporaryDirectory() as cache,
        served("--slots", "16", "--max-length", "1024", "--compilation-cache", cache) as server,
    ):
        found, plain, before, after = asyncio.run(measure(server, int(clients)))
    alone = max(found.pop("alone"))
    over = {name: round((np.max(gaps) - alone) * 1e3) for name, gaps in found.items()}
    print(f"alone {alone * 1e3:.0f} ms; over that: {json.dumps(over)} ms")
    print(f"plain requests: {plain:.2f} s at most; memory: {before} MiB before, {after} after")
    assert max(over.values()) <= float(over_ms)
    assert after - before <= float(most_mib)


if __name__ == "__main__":
    main(*sys.argv[1:])
