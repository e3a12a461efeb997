"""Engines and workers that are killed or stopped at random moments.

    python -m tests.heavy.engine_deaths --scripted 500 --real 50

In each round an engine runs requests on two scripted workers, or on a real one of two processes
(`--real`). At a random moment, from its first import to its shutdown, one process of them is killed
or stopped. How long an engine takes from one to the other is measured before, undisturbed, with as
many rounds side by side as later. Then:

- after its engine's SIGKILL, no process is alive a second later (the slowest is printed); time that
  a process, or this check, waited for a core, because other programs had them, does not count;
- after any other blow, every request has one end, with a reason, and the engine closes;
- no process and no ring is left, nor a socket; of a killed engine, `doctor` removes its directory.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ipc.doctor import find_ring_files
from jax_specdec.engine import leftovers
from tests.support import quick_compile
from tests.support.processes import children_of, family, is_alive, marked, wait_for

SECONDS = 1.0  # in which all processes end after their engine's death
MARK = "ENGINE_DEATHS"
AT_ONCE = {"scripted": 4, "real": 2}  # rounds side by side: most of their time they wait
BLOWS = {
    "scripted": ("kill engine", "kill lead", "stop lead", "stop engine"),
    "real": ("kill engine", "kill lead", "kill follower", "stop lead", "stop follower",
             "stop engine"),
}  # fmt: skip
# Seconds after which a silent worker is lost. Where none is stopped, none must be taken for lost,
# however busy this machine is.
SILENCE = {blow: 10 if blow == "stop engine" else 3 for blows in BLOWS.values() for blow in blows}
PATIENCE = 240.0  # for an engine that goes on


def starved(pid):
    """Seconds that a process's main thread has waited for a core so far; None once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, IndexError):
        return None


class Round:
    """One engine, one blow; `delay` seconds after its start, or never (None)."""

    def __init__(self, kind, blow, delay, folder, seed):
        self.kind, self.blow, self.delay = kind, blow, delay
        self.random = random.Random(seed)
        self.mark = uuid.uuid4().hex
        environment = os.environ | {MARK: self.mark, "TMPDIR": str(folder)}
        if kind == "real":
            environment |= {"XLA_FLAGS": quick_compile.FLAGS, "JAX_PLATFORMS": "cpu"}
            # A blow while a program is compiled takes programs that are compiled.
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        self.folder = folder
        silence = str(SILENCE["stop engine" if delay is None else blow])
        self.output = (folder / "output").open("w+")
        self.engine = subprocess.Popen(
            [sys.executable, "-m", "tests.heavy.engine_driver", kind, silence],
            env=environment, stdout=self.output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def victim(self):
        """The process to strike; None where it does not exist at this moment."""
        target = self.blow.split()[1]
        if target == "engine":
            return self.engine.pid
        leads = [pid for pid in children_of(self.engine.pid) if is_alive(pid)]
        if target == "lead":
            return self.random.choice(leads) if leads else None
        followers = [pid for lead in leads for pid in children_of(lead) if is_alive(pid)]
        return self.random.choice(followers) if followers else None

    def run(self):
        """Strike and watch; returns a word for the outcome and the seconds that an end took."""
        try:
            if self.delay is None:
                return self.judged("undisturbed")
            time.sleep(self.delay)
            if self.engine.poll() is not None:
                return self.judged("over before")
            victim = self.victim()
            if victim is None:
                return self.judged("nobody there")
            if self.blow == "kill engine":
                return self.killed_engine()
            os.kill(victim, signal.SIGSTOP if "stop" in self.blow else signal.SIGKILL)
            if self.blow == "stop engine":
                time.sleep(self.random.uniform(0, 1.5))
                os.kill(victim, signal.SIGCONT)
            return self.judged("struck")
        except ProcessLookupError:  # it ended by itself at this very moment
            return self.judged("over before")
        finally:
            for pid in marked(self.mark):
                os.kill(pid, signal.SIGKILL)
            self.engine.kill()
            self.engine.wait()
            self.output.close()

    def killed_engine(self):
        # The engine too: a process that is killed needs a core to end.
        ending = [self.engine.pid, *family(self.engine.pid)]
        waits = {pid: [starved(pid) or 0.0] for pid in ending}
        me = f"self/task/{threading.get_native_id()}"
        own = starved(me)

        def all_ended():
            for pid in ending:
                if (wait := starved(pid)) is not None:
                    waits[pid].append(wait)
            return not any(map(is_alive, ending)) and not marked(self.mark)

        began = time.monotonic()
        self.engine.kill()
        wait_for(all_ended, 30)
        taken = time.monotonic() - began
        self.engine.wait()
        leftovers.remove(
            leftovers.find_leftovers(self.folder)
        )  # a dead engine cannot remove its directory
        self.nothing_left(kept=False)
        taken -= max((max(wait) - wait[0] for wait in waits.values()), default=0.0)
        return "engine killed", max(taken - (starved(me) - own), 0.0)

    def judged(self, word):
        """Let the engine come to its end and check what it said."""
        self.engine.wait(PATIENCE)
        said = (self.folder / "output").read_text()
        assert self.engine.returncode == 0, (self.engine.returncode, said)
        runs = [json.loads(line) for line in said.splitlines() if line.startswith('{"ends"')]
        assert [len(run["ends"]) for run in runs] == [12] * 3, said
        if word == "undisturbed" or self.blow == "stop engine":
            assert not any(run["lost"] for run in runs), said
        assert said.endswith("closed\n")
        wait_for(lambda: not marked(self.mark), 10)
        self.nothing_left(kept=True)
        return word, 0.0

    def nothing_left(self, kept):
        """No segment, and no directory but one with a lost worker's output, where such are kept.

        Nobody is told of a worker that is lost between the last request's end and the engine's.
        """
        mine = self.engine.pid
        wait_for(lambda: mine not in {file.creator.pid for file in find_ring_files()}, 5)
        told = [each.path for each in leftovers.find_leftovers(self.folder) if kept and each.losses]
        left = [path for path in self.folder.glob("jax-specdec-*") if path not in told]
        assert not left, left


def one_round(kind, number, delay, seed):
    """Run one round in a directory of its own; (what it was, how it ended, seconds)."""
    blow = BLOWS[kind][number % len(BLOWS[kind])]
    folder = Path(tempfile.mkdtemp(prefix="deaths-"))
    try:
        return blow, *Round(kind, blow, delay, folder, seed).run()
    except BaseException:
        print(f"round {number} of {kind}: {blow} after {delay} s; seed {seed}", flush=True)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def length_of(kind, at_once):
    """Seconds that an undisturbed round takes beside as many others as later."""
    with ThreadPoolExecutor(at_once) as pool:
        began = time.monotonic()
        list(pool.map(lambda number: one_round(kind, number, None, number), range(at_once)))
        return time.monotonic() - began


def rounds(kind, count, at_once):
    """Run `count` rounds; prints what they were. Returns how many failed or took too long."""
    length = length_of(kind, at_once)
    print(f"{kind}: an undisturbed round takes {length:.1f} s, {at_once} side by side", flush=True)

    def run(drawn):
        try:
            return one_round(kind, *drawn)
        except Exception:
            return traceback.print_exc()

    drawn = [(n, random.uniform(0, length), random.random()) for n in range(count)]
    with ThreadPoolExecutor(at_once) as pool:
        found = list(filter(None, pool.map(run, drawn)))
    outcomes = collections.Counter(f"{blow}: {word}" for blow, word, _ in found)
    seconds, failed = [0.0, *(taken for _, _, taken in found)], count - len(found)
    late = [taken for taken in seconds if taken > SECONDS]
    print(f"{kind}: {count} rounds, {failed} failed; {dict(outcomes)}; the last process ended "
          f"{max(seconds):.3f} s after its engine at most, {len(late)} after more than {SECONDS} s",
          flush=True)  # fmt: skip
    return failed + len(late)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--scripted", type=int, default=500, help="rounds with scripted workers")
    parser.add_argument("--real", type=int, default=50, help="rounds with the real one")
    parser.add_argument("--at-once", type=int, default=None, help="rounds side by side")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    random.seed(seed)
    print(f"seed {seed}", flush=True)
    counts = {"scripted": options.scripted, "real": options.real}
    wrong = [rounds(kind, n, options.at_once or AT_ONCE[kind]) for kind, n in counts.items() if n]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(main())
