"""The examples, run as a user runs them; what they print is what they claim.

The NNX example is not among them, because flax is no small dependency: `check_examples_nnx.py`.
"""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
REQUESTS = ("greedy", "sampled", "ids only")


@functools.cache
def environment():
    """The user's own, but that compiling, which takes nearly all the time here, takes less."""
    cache = tempfile.TemporaryDirectory(prefix="examples-")
    return cache, os.environ | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": cache.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def run(script, *options, status=0):
    """What an example prints. A warning in it is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / script, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=environment()[1],
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def texts(printed):
    """The text of each request, from the lines that begin with its name."""
    found = {}
    for name in REQUESTS:
        (found[name],) = re.findall(rf"^{name} +(.*?)(?:  \([a-z_]+\))?$", printed, re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def own_loop():
    return run("own_loop.py")


def test_a_loop_of_ones_own_delivers_what_each_request_asked_for(own_loop):
    said = texts(own_loop)
    assert said["greedy"].startswith("Alice was ")
    assert len(said["greedy"]) == len("Alice was") + 60
    assert len(said["ids only"]) == len("So she") + 30
    for name in REQUESTS:
        assert re.search(rf"^step 0  {name} ", own_loop, re.MULTILINE)
        assert re.search(rf"^{name} .*\((length|stop_token)\)$", own_loop, re.MULTILINE)
    assert "no logprobs asked" in own_loop
    # Drafts and their own logprobs are there, and some of them were accepted.
    drafted = re.search(r"drafted '...', logprobs \[(.*)\]", own_loop)
    assert all(float(logprob) <= 0 for logprob in drafted[1].split())
    assert 0 < int(re.search(r"accepted (\d+)% of the drafts", own_loop)[1]) < 100
    # The greedy request's token is the most likely one, twice with the same logprob.
    rows = re.findall(r"'(.)' (-\d\.\d+), rank 1; top: '(.)' (-\d\.\d+),", own_loop)
    assert rows
    assert all((token, logprob) == (best, top) for token, logprob, best, top in rows)


def test_a_jitted_loop_goes_on_without_its_engine(own_loop):
    printed = run("jitted_loop.py", "--die-after", "3", "--then", "go-on")
    assert "engine: 3 steps read, and killed" in printed
    assert "nobody listens any more: the consumer (pid" in printed
    assert texts(printed) == texts(own_loop)  # the same model, to the end
    steps, published = map(int, re.search(r"(\d+) steps, (\d+) published", printed).groups())
    assert 2 <= published <= 4 < steps


def test_a_jitted_loop_ends_where_nobody_listens(own_loop):
    printed = run("jitted_loop.py", "--close-after", "3")
    assert "engine: 3 steps read, " in printed
    assert "nobody listens any more: the consumer closed ring" in printed
    steps, published = map(int, re.search(r"(\d+) steps, (\d+) published", printed).groups())
    # The step that could not be sent is the last one. Five messages were read, the third step's
    # second one perhaps never sent, and the ring holds four more.
    assert steps == published + 1
    assert 2 <= published <= 4
    whole = texts(own_loop)
    for name, text in texts(printed).items():
        assert whole[name].startswith(text)
        assert len(text) < len(whole[name])


def test_an_exception_in_the_callback_is_not_lost():
    printed = run("jitted_loop.py", "--slot-bytes", "100", status=1)
    assert "ipc.errors.MessageTooLarge" in printed
    assert "nobody listens" not in printed
    assert "engine: 0 steps read" in printed.replace("None", "0")


def test_asyncio_reads_two_workers_and_does_other_things():
    printed = run("asyncio_engine.py")
    assert len(re.findall(r"(?:length|stop_token) after \d+ records?\b", printed)) == 3
    assert set(texts(printed)) == set(REQUESTS)
    assert int(re.search(r"did (\d+) other things", printed)[1]) > 10


def test_a_worker_of_ones_own_that_raises_ends_its_requests_as_lost(tmp_path):
    """Its stream ends as that of one that is done: the engine's side must look who is left."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    script = tmp_path / "examples" / "own_loop.py"
    script.write_text(script.read_text().replace("slot_bytes=1 << 16", "slot_bytes=64"))
    printed = run(script, status=1)
    assert "does not fit a slot of 64 bytes" in printed
    assert printed.count("(worker_lost)") == 3
    assert "the worker failed: exit status 1" in printed
    assert "KeyError" not in printed


def test_asyncio_loses_a_worker_and_serves_the_others_requests():
    printed = run("asyncio_engine.py", "--kill")
    assert "a worker is lost: the producer (pid" in printed
    assert re.search(r"^ids only  So she$\n +worker_lost after 1 record,", printed, re.MULTILINE)
    assert len(re.findall(r"(?:length|stop_token) after \d+ records?\b", printed)) == 2


def test_rollouts_scored_again_have_the_same_logprobs():
    printed = run("rl_rollouts.py")
    found = re.findall(r"\|log ratio\| of (\d+) tokens: (\S+)", printed)
    assert [int(count) for count, _ in found] == [384, 384]
    assert all(float(largest) <= 1e-4 for _, largest in found)
    ratios = re.findall(r"epoch (\d): importance ratios from (\S+) to (\S+)", printed)
    for epoch, low, high in ratios:
        if epoch == "0":  # nothing was updated yet
            assert (low, high) == ("1.000", "1.000")
        else:
            assert float(low) < 0.99 < 1.01 < float(high)
    assert len(ratios) == 4


def test_logprobs_of_another_distribution_are_noticed():
    """The negative control: raw logprobs of tempered samples."""
    printed = run("rl_rollouts.py", "--mode", "raw", status=1)
    assert float(re.search(r"of 384 tokens: (\S+)", printed)[1]) > 0.1
    assert "the rollouts are of another policy" in printed


@pytest.mark.fast
@pytest.mark.parametrize("script", ["own_loop.py", "asyncio_engine.py", "jitted_loop_engine.py"])
def test_the_reading_side_never_loads_jax(script):
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import {script.removesuffix('.py')};"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fast
def test_an_example_is_short():
    for path in EXAMPLES.glob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text()))
        if "tiny" not in path.name:
            assert len(path.read_text().splitlines()) <= 150, path
