"""The examples, run as a user runs them; what they print is what they claim.

The NNX example is not among them, because flax is no small dependency: `check_examples_nnx.py`.
"""

import ast
import re
import shutil

import numpy as np
import pytest

from tests.support.paths import ROOT
from tests.support.run_examples import EXAMPLES, run

REQUESTS = ("greedy", "sampled", "ids only")
BETWEEN = "---- the next run ----"
ENDS = re.compile(r"(?:length|stop_token) after \d+ records?\b")
STEPS = re.compile(r"(\d+) steps, (\d+) published")


def texts(printed):
    """The text of each request, from the lines that begin with its name."""
    found = {}
    for name in REQUESTS:
        (found[name],) = re.findall(rf"^{name} +(.*?)(?:  \([a-z_]+\))?$", printed, re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def own_loop():
    return run(EXAMPLES / "own_loop.py")


@pytest.fixture(scope="module")
def reading_side(tmp_path_factory):
    """The examples with a worker that runs no model."""
    folder = tmp_path_factory.mktemp("reading") / "examples"
    shutil.copytree(EXAMPLES, folder)
    shutil.copy(ROOT / "tests/docs/story_worker.py", folder / "own_loop_worker.py")
    return folder


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
    drafted = re.search(r"drafted '..', logprobs \[(.*)\]", own_loop)
    assert all(float(logprob) <= 0 for logprob in drafted[1].split())
    assert 0 < int(re.search(r"accepted (\d+)% of the drafts", own_loop)[1]) < 100
    # The greedy request's token is the most likely one, twice with the same logprob.
    rows = re.findall(r"'(.)' (-\d\.\d+), rank 1; top: '(.)' (-\d\.\d+),", own_loop)
    assert rows
    assert all((token, logprob) == (best, top) for token, logprob, best, top in rows)


@pytest.mark.slow
def test_a_jitted_loop_goes_on_or_ends_without_its_engine(own_loop):
    """The engine is killed and the loop goes on; it closes the ring; a message does not fit."""
    runs = "--die-after 3 --then go-on", "--close-after 3", "--slot-bytes 100"
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\nimport jitted_loop\n"
        f"for options in {runs}:\n"
        f"    print({BETWEEN!r}, flush=True)\n    jitted_loop.main(options.split())"
    )
    _, killed, closed, failed = run("-c", code, status=1).split(BETWEEN + "\n")
    whole = texts(own_loop)

    assert "engine: 3 steps read, and killed" in killed
    assert "the engine is gone: the consumer (pid" in killed
    assert texts(killed) == whole  # the same model, to the end
    steps, published = map(int, STEPS.search(killed).groups())
    assert 2 <= published <= 4 < steps

    assert "engine: 3 steps read, " in closed
    assert "the engine is gone: the consumer closed ring" in closed
    steps, published = map(int, STEPS.search(closed).groups())
    # The step that could not be sent is the last one. Five messages were read, the third step's
    # second one perhaps never sent, and the ring holds four more.
    assert 2 <= published == steps - 1 <= 4
    for name, text in texts(closed).items():
        assert whole[name].startswith(text)
        assert len(text) < len(whole[name])

    assert "ipc.errors.MessageTooLarge" in failed  # an exception in the callback is not lost
    assert "the engine is gone" not in failed
    assert "engine: 0 steps read" in failed.replace("None", "0")


def test_asyncio_reads_two_workers_and_loses_one(reading_side):
    """It does other things meanwhile, and serves the other worker's requests to their ends."""
    printed = run(reading_side / "asyncio_engine.py")
    assert (len(ENDS.findall(printed)), set(texts(printed))) == (3, set(REQUESTS))
    assert int(re.search(r"did (\d+) other things", printed)[1]) > 10
    printed = run(reading_side / "asyncio_engine.py", "--kill")
    assert "a worker is lost: the producer (pid" in printed
    assert re.search(r"^ids only  So she$\n +worker_lost after 1 record,", printed, re.MULTILINE)
    assert len(ENDS.findall(printed)) == 2


def test_an_own_worker_that_raises_ends_its_requests_as_lost(reading_side):
    """Its stream ends like a finished worker's: the engine must see which requests are left."""
    script = reading_side / "own_loop_with_a_small_ring.py"
    source = (reading_side / "own_loop.py").read_text()
    script.write_text(source.replace("slot_bytes=1 << 16", "slot_bytes=64"))
    printed = run(script, status=1)
    assert "does not fit a slot of 64 bytes" in printed
    assert printed.count("(worker_lost)") == 3
    assert "the worker failed: exit status 1" in printed
    assert "KeyError" not in printed


def test_rollouts_scored_again_have_the_same_logprobs():
    """Two iterations; digests notice at the end that the weights have moved."""
    printed = run(EXAMPLES / "rl_rollouts.py", "--iterations", "2")
    ratios = re.findall(r"^\d\.(\d): 384 ratios from (\S+) to (\S+)$", printed, re.MULTILINE)
    for epoch, low, high in ratios:
        if epoch == "0":  # nothing was updated yet
            assert (low, high) == ("1.000", "1.000")
        else:
            assert float(low) < 0.99 < 1.01 < float(high)
    assert len(ratios) == 4
    assert "rows of other logits, by their digests: 384;" in printed
    assert re.findall(r"^ +(\d) 0\.\d{3} #{30,}$", printed, re.MULTILINE) == ["0", "1"]
    assert len((EXAMPLES / "rl_rollouts.py").read_text().splitlines()) < 120


@pytest.mark.slow
def test_a_policy_learns_and_raw_logprobs_are_noticed():
    printed = run(EXAMPLES / "rl_rollouts.py")
    means = [float(x) for x in re.findall(r"^ +\d (0\.\d{3}) #+$", printed, re.MULTILINE)]
    assert len(means) == 8
    assert max(means[5:]) > 1.2 * means[0]
    printed = run(EXAMPLES / "rl_rollouts.py", "--mode", "raw", "--iterations", "1", status=1)
    assert "all must be 1: the rollouts are of another policy" in printed


@pytest.mark.fast
def test_the_reading_side_never_loads_jax():
    readers = "own_loop, asyncio_engine, jitted_loop_engine"
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import {readers}\n"
    assert run("-c", code + "print('jax' in sys.modules)") == "False\n"


@pytest.mark.slow
def test_functions_of_engines_move_less_for_equal_results():
    """The example compares the values itself; its figures are those of the page."""
    printed = run(EXAMPLES / "serving_engines.py")
    assert printed in (ROOT / "docs" / "integration_serving.md").read_text()


def test_flat_rows_to_a_reader_in_45_lines():
    """Three requests of nine tokens; the reading process does not know jax."""
    printed = run(EXAMPLES / "flat_rows.py")
    for slot in range(3):
        rows = re.findall(rf"^request {slot} \[([\d ]+)\] \[([-\d. ]+)\]$", printed, re.MULTILINE)
        ids, logprobs = (" ".join(column).split() for column in zip(*rows, strict=True))
        assert len(ids) == len(logprobs) == 9
        assert all(-12 < float(logprob) <= 0 for logprob in logprobs)
    source = (EXAMPLES / "flat_rows.py").read_text()
    assert code_lines(source) <= 45
    assert not re.search(r"^(import|from) (jax|jax_specdec.device|pallas_kernels)\b", source, re.M)
    readme = (ROOT / "README.md").read_text().partition("## The sampler of your decoding loop")[2]
    loop, whole = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[:2]
    assert code_lines(loop) <= 20
    assert code_lines(whole) <= 3


def code_lines(source):
    """Lines that are no comment, no docstring and not empty."""
    tree = ast.parse(source)
    texts = [
        node.body[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node)
    ]
    prose = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in prose
        for number, line in enumerate(source.splitlines(), 1)
    )


def test_records_of_a_loop_in_25_lines():
    """Each request gets its tokens; a greedy one's are its most likely ones."""
    printed = run(EXAMPLES / "records_of_a_loop.py")
    for slot, columns in ((0, 3), (1, 1)):
        said = rf"^request {slot}: \[([\d ]+)\], \d.*\n((?:.*\]\n)+)"
        ids, rows = map(" ".join, zip(*re.findall(said, printed, re.MULTILINE), strict=True))
        assert len(ids.split()) == 6
        table = np.array([row.strip(" []").split() for row in rows.splitlines()])
        assert table.shape == (6, columns)
        assert columns == 1 or (table[:, 0] == table[:, 1]).all()
    source = (EXAMPLES / "records_of_a_loop.py").read_text()
    body = source.partition("@jax.jit")[2].partition("if __name__")[0]
    assert len([line for line in body.splitlines() if line.strip()]) <= 25
    assert len(re.findall("^(?:import|from)", source, re.MULTILINE)) == 6


def test_a_student_approaches_its_teacher():
    printed = run(EXAMPLES / "distil_support.py")
    assert "the teacher scored 142 of 142 tokens" in printed
    values = [float(x) for x in re.findall(r"^ *\d+ +(\d\.\d\d) #+$", printed, re.MULTILINE)]
    assert len(values) == 10
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0] / 3
    ours, plain = map(int, re.search(r"(\d+) MB of temporaries, plain (\d+) MB", printed).groups())
    assert ours < plain / 5
    assert len((EXAMPLES / "distil_support.py").read_text().splitlines()) < 120


def test_ratios_of_older_weights_are_among_the_kept_tokens():
    printed = run(EXAMPLES / "off_policy.py")
    means = [float(x) for x in re.findall(r"mean ratio (\d\.\d{3})", printed)]
    same, near, far, wrong = means
    assert same == 1
    assert abs(near - 1) < 0.02
    assert abs(far - 1) < 0.05
    assert wrong < 0.95
    bins = [int(x) for x in re.findall(r"^  \d\.\d\d to .{4} +(\d+) #*$", printed, re.MULTILINE)]
    tokens = 16 * 24
    assert np.array(bins).reshape(4, 7).sum(axis=1).tolist() == [tokens] * 4
    assert bins[3] == tokens  # of the weights that drew: each ratio is 1
    assert len((EXAMPLES / "off_policy.py").read_text().splitlines()) < 120
