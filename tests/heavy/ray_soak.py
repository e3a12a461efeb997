"""A fleet on three raylets of this machine, of which any process is killed at any moment.

    python -m tests.heavy.ray_soak --minutes 10 --requests 2000

First 2,000 greedy requests run on 6 replicas over 3 nodes; in mid-run a node is lost and another
one joins. Then requests run for the given time, while workers, replicas' actors, raylets and whole
nodes are killed. Workers are scripted ones: what an undisturbed run gives is known. Each position
of every request came once, in order, with the ids and logprobs of such a run. At the end no
process of a replica lives, and no ring is in /dev/shm. That holds for rings of crashed nodes too,
for which no real cluster could answer: the nodes here are one host, and each replica that begins or
closes on it removes the rings of all its dead processes.
"""

import argparse
import collections
import os
import random
import signal
import sys
import time
from pathlib import Path

from jax_specdec.engine import leftovers
from tests.ray.cluster import (
    add_node,
    check,
    cluster_of,
    crash,
    fleet,
    kill_raylet,
    make_requests,
    nothing_is_left,
    pids,
    rings,
)
from tests.support.processes import is_alive, wait_for

NODES, REPLICAS, CPUS = 3, 6, 3
BLOWS = ("kill worker", "kill actor", "kill raylet", "crash node")


class Soak:
    """A fleet, the blows that it got, and the processes that it had."""

    def __init__(self, cluster, engine):
        self.cluster, self.engine = cluster, engine
        self.blows = collections.Counter()
        self.seen = set()
        self.tokens = 0

    def run(self, requests, at, blow):
        """Run requests, strike after `at` tokens, and compare all that came."""
        batches, came, began = [], 0, time.monotonic()
        for batch in self.engine.generate(requests):
            batches.append(batch)
            came += batch.num_tokens
            if blow is not None and came >= at:
                self.strike(blow)
                blow = None
        check(requests, batches)
        self.tokens += came
        return time.monotonic() - began

    def strike(self, blow):
        there = pids(self.engine)
        self.seen |= {pid for found in there.values() for pid in found}
        nodes = [node for node in self.cluster.workers if node in self.cluster.list_all_nodes()]
        self.blows[blow] += 1
        if blow in ("kill raylet", "crash node"):
            node = random.choice(nodes)
            self.cluster.workers.remove(node)
            if blow == "kill raylet":
                kill_raylet(node)
            else:
                crash(node, self.engine)
            add_node(self.cluster, CPUS)
        elif there:
            found = random.choice(list(there.values()))
            os.kill(found[blow == "kill worker" and len(found) > 1], signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    random.seed(seed)
    print(f"seed {seed}", flush=True)
    before, shared = rings(), set(Path("/dev/shm").iterdir())
    with cluster_of(*(CPUS,) * NODES) as cluster, fleet(REPLICAS) as engine:
        soak = Soak(cluster, engine)
        wait_for(lambda: len(pids(engine)) == REPLICAS, 200)
        first = make_requests(options.requests, 20)
        taken = soak.run(first, options.requests * 5, "crash node")
        print(
            f"{len(first)} requests on {REPLICAS} replicas, a node lost and one added: "
            f"{taken:.1f} s; all as undisturbed",
            flush=True,
        )
        rounds, end = 0, time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            requests = make_requests(200, 40, first=rounds * 200)
            blow = random.choice(BLOWS)
            taken = soak.run(requests, random.randint(0, 6000), blow)
            rounds += 1
            print(f"round {rounds}: {blow}: {taken:.1f} s", flush=True)
        wait_for(lambda: len(pids(engine)) == REPLICAS, 120)
        lost = sum(status.losses for status in engine.status)
        soak.seen |= {pid for found in pids(engine).values() for pid in found}
        print(
            f"{rounds} rounds, {soak.tokens} tokens, blows {dict(soak.blows)}, {lost} replicas "
            f"lost; {engine.traffic}",
            flush=True,
        )
    wait_for(lambda: not any(map(is_alive, soak.seen)), 60)
    wait_for(lambda: nothing_is_left(before), 30)
    left = {path.name for path in set(Path("/dev/shm").iterdir()) - shared}
    dead = [one for one in leftovers.find() if one.state == "dead"]
    leftovers.remove(dead)
    print(f"in /dev/shm: {sorted(left) or 'nothing'}; {len(dead)} engines' directories removed")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
