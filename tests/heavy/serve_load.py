"""A server under load: 64 streaming clients for a minute, some of which leave, and a killed worker.

    python -m tests.heavy.serve_load [SECONDS [CLIENTS]]

No request may stay without an answer or an error; afterwards no slot is taken, nothing of the
server is in /dev/shm, and its memory has not grown. Prints the median and the 99th percentile of
the time to the first token and between two chunks, and how long nobody got anything: that is how
long the only worker was away, as its successor imports jax, loads the model, and traces, lowers and
reads back its programs. (None is compiled again: all come out of the cache.)
"""

import asyncio
import collections
import os
import random
import signal
import sys
import time
from pathlib import Path

import httpx
import numpy as np

from tests.support.served_process import served

LEAVES = 0.2  # the share of requests whose client leaves in the middle
KILLED_AFTER = 0.4  # of the time
GROWTH_MB = 200


async def client(url, seed, until, outcomes, firsts, gaps, arrivals):
    """Ask again and again, and count how each request ended."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while time.monotonic() < until:
            body = {
                "prompt": "def " + "".join(rng.choices("abcdef_", k=rng.randint(1, 40))) + "(",
                "max_tokens": rng.choice((2, 8, 40)), "logprobs": 2, "stream": True,
                "seed": rng.randrange(2**32), "temperature": rng.choice((0.0, 1.0)),
            }  # fmt: skip
            leaves_after = rng.randint(1, 5) if rng.random() < LEAVES else None
            outcomes[await one(http, body, leaves_after, firsts, gaps, arrivals)] += 1


async def one(http, body, leaves_after, firsts, gaps, arrivals):
    """How one request ended; its times are added to `firsts`, `gaps` and `arrivals`."""
    began = last = time.monotonic()
    ended = "no end"
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}"
            count = 0
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return ended
                if not line:
                    continue
                now = time.monotonic()
                (gaps if count else firsts).append(now - last if count else now - began)
                last, count = now, count + 1
                arrivals.append(now)
                if '"error"' in line:
                    ended = "error"
                elif '"finish_reason": null' not in line:
                    ended = "answered"
                if leaves_after is not None and count >= leaves_after:
                    return "left"
    except httpx.HTTPError as error:
        return type(error).__name__
    return ended


def worker_pid(process):
    """The model worker: the only child of the server, whichever of its threads started it."""
    (pid,) = [
        child
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return int(pid)


async def load(url, pid, seconds, clients):
    """Run the clients, kill the worker between, and return what happened."""
    outcomes, firsts, gaps, arrivals = collections.Counter(), [], [], [time.monotonic()]
    until = time.monotonic() + seconds

    async def kill():
        await asyncio.sleep(seconds * KILLED_AFTER)
        os.kill(pid, signal.SIGKILL)

    await asyncio.gather(
        kill(),
        *(client(url, seed, until, outcomes, firsts, gaps, arrivals) for seed in range(clients)),
    )
    return outcomes, firsts, gaps, float(np.diff(np.sort(arrivals)).max())


def report(name, seconds):
    low, high = np.percentile(np.array(seconds) * 1e3, (50, 99))
    print(f"{name}: p50 {low:.1f} ms, p99 {high:.1f} ms ({len(seconds)} of them)")


def rss_mb(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def numbers(url, *names):
    """Values of the server's metrics, by the beginnings of their names."""
    page = httpx.get(f"{url}/metrics", timeout=60).text
    return [float(line.split()[-1]) for line in page.splitlines() if line.startswith(names)]


def main(seconds="60", clients="64"):
    with served("--slots", "16", "--max-length", "256") as server:
        url, process = server.url, server.process.pid
        for temperature in (0, 1):  # what is compiled for either is no part of the load
            body = {"prompt": "a", "max_tokens": 2, "logprobs": 2, "temperature": temperature}
            httpx.post(f"{url}/v1/completions", timeout=600, json=body).raise_for_status()
        pid, before = worker_pid(server.process), rss_mb(process)
        outcomes, firsts, gaps, away = asyncio.run(load(url, pid, float(seconds), int(clients)))
        after = rss_mb(process)
        print(f"requests: {dict(outcomes)}")
        report("time to the first token", firsts)
        report("between two chunks", gaps)
        print(f"the longest time without a chunk for anybody: {away:.1f} s")
        print(f"the server's memory: {before:.0f} MB before, {after:.0f} MB after")
        deadline = time.monotonic() + 60
        while any(left := numbers(url, "jax_specdec_live", "jax_specdec_waiting_requests")):
            assert time.monotonic() < deadline, f"requests are left: {left}"
            time.sleep(0.5)
        (restarts,) = numbers(url, "jax_specdec_worker_restarts_total")
    assert server.exit_status == 0, server.exit_status
    wrong = set(outcomes) - {"answered", "left"}
    assert not wrong, wrong
    assert outcomes["answered"]
    assert outcomes["left"]
    assert restarts == 1
    assert after - before < GROWTH_MB
    left = [name for name in os.listdir("/dev/shm") if f".{process}." in name]
    assert not left, left
    print("nothing is left, and every request had its end")


if __name__ == "__main__":
    main(*sys.argv[1:])
