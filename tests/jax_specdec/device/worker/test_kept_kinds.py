"""Programs that an earlier start kept: nothing is traced, and what they compute is the same."""

import functools
import zlib
from dataclasses import replace

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jax_specdec import compiled_programs
from jax_specdec.control import ProcessStats, WorkerConfig
from jax_specdec.declaration import Serves
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.worker import compilation_cache, kept_kinds, worker_process
from jax_specdec.device.worker.kept_kinds import KeptKinds
from jax_specdec.device.worker.prepared import Arguments
from jax_specdec.requests import SamplingParams
from tests.support import letters
from tests.support.compiled_here import compiled_here
from tests.support.decoding import Local, request
from tests.support.processes import output_of

PROMPT = [1, 2, 3, 1, 2, 3, 1]
GRAMMAR = {"structured": letters.WORDS_PATTERN, "stop_token_ids": (letters.END,)}
ASKED = ({"logprobs": 2}, {"temperature": 0.7, "seed": 5}, {"prompt_logprobs": 1}, GRAMMAR)
SERVES = Serves.of(SamplingParams(**asked) for asked in ASKED)
SETTINGS = WorkerConfig(vocab_size=9)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of kept kinds alone: what the suite's own cache has of these programs is not read."""
    monkeypatch.setattr(compilation_cache, "folder", lambda: tmp_path)
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    yield tmp_path
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()


def started():
    """A worker with programs of its own, as its process makes it ready."""
    sizes = {"num_slots": 2, "max_length": 72}  # of no other test's: jax would have the programs
    config = Local("ngram", **sizes).worker.config
    options = {"vocabulary": letters.vocabulary, "serves": SERVES}
    local = Local("ngram", programs=Compiled(config, cuts=False), **options, **sizes)
    before = functools.partial(worker_process.kinds_before_ready, SETTINGS, None)
    worker_process.compile_served(local.worker, ProcessStats(), before)
    local.worker.rehearse(local.worker.kinds())
    return local


def answers(local):
    """The tokens and logprobs of requests of each kind."""
    said = []
    for index, asked in enumerate(ASKED):
        local.admit(request(f"r{index}", PROMPT, max_tokens=5, **asked))
        local.drain()
        local.rank.leave(f"r{index}")
        for record in local.records[f"r{index}"]:
            rows = (record.logprobs, record.prompt and record.prompt.logprobs)
            said.append([record.token_ids.tolist(), *(r is not None and r.tobytes() for r in rows)])
    return said


def kept_of(local, folder):
    worker = local.worker
    arguments = Arguments.of(worker.params, worker.state)
    return KeptKinds.of(folder, worker.compiled, arguments, worker.prefill_chunk)


@pytest.mark.long
def test_a_start_that_finds_its_programs_traces_none(folder):
    with compiled_here() as names:
        first = started()
    assert "jit(step)" in names
    expected = answers(first)
    assert len([*folder.glob("kind_*-cache")]) == len(first.worker.kinds()) + 2
    assert all(map(compiled_programs.is_whole, folder.iterdir()))
    with compiled_here() as names:
        second = started()
        assert answers(second) == expected
    assert not {"jit(step)", "jit(choose)", "jit(score_chunk)", "jit(prefill_chunk)"} & {*names}

    # Kinds that share a step share its executable: who has run it for one has for the other.
    greedy, with_logprobs = (
        next(kind for kind in second.worker.kinds() if kind.widths.k == k and not kind.samples)
        for k in (None, 5)
    )
    steps = {id(second.worker.programs(kind).step.stage) for kind in (greedy, with_logprobs)}
    assert len(steps) == 1

    # What is no such file is compiled, and kept again.
    rung, *_ = second.worker.kinds()
    kept = kept_of(second, folder)
    for data in (b"", b"x", zlib.compress(b"x"), kept.path(rung).read_bytes()[:-9]):
        kept_of(second, folder).path(rung).write_bytes(data)
        assert kept_of(second, folder).load(rung) is None
    with compiled_here() as names:
        assert answers(started()) == expected
    assert "jit(step)" in names
    assert kept.load(rung) is not None


def test_other_programs_have_other_files(folder, monkeypatch):
    """Everything that programs follow from is in a file's name."""
    worker = Local("ngram", serves=SERVES).worker
    config, arguments = worker.config, Arguments.of(worker.params, worker.state)
    other = Arguments.of(worker.params, Local("ngram", max_length=80).worker.state)

    def path(config=config, arguments=arguments, chunk=8, kind=None):
        kept = KeptKinds.of(folder, Compiled(config, cuts=False), arguments, chunk)
        return kept.path(kind)

    paths = [
        path(),
        path(replace(config, implementation="xla")),
        path(replace(config, num_slots=2)),
        path(replace(config, model=replace(config.model, rope_theta=5.0))),
        path(arguments=other),
        path(chunk=16),
        *(path(kind=kind) for kind in (*worker.kinds(), worker.ladder.prompt)),
    ]
    with jax.default_matmul_precision("highest"), jax.enable_x64(True):
        paths.append(path())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    paths.append(path())
    monkeypatch.delenv("XLA_FLAGS")
    with monkeypatch.context() as patch:
        patch.setattr(kept_kinds.os, "sched_getaffinity", lambda process: range(99))
        paths.append(path())
    monkeypatch.setattr(kept_kinds, "sources_digest", lambda: "of another release")
    paths.append(path())
    assert len({*paths}) == len(paths)
    monkeypatch.undo()
    assert path() == paths[0]


def test_the_digest_of_sources_is_of_every_file(tmp_path, monkeypatch):
    package = tmp_path / "a_package"
    (package / "inside").mkdir(parents=True)
    files = [package / "__init__.py", package / "inside" / "deep.py"]
    for file in files:
        file.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kept_kinds, "PACKAGES", ("a_package",))
    digests = {kept_kinds.sources_digest.__wrapped__()}
    for file in files:
        file.write_text("x = 2\n")
        digests.add(kept_kinds.sources_digest.__wrapped__())
    assert len(digests) == 3


def test_what_nobody_can_describe_is_not_kept(folder):
    worker = Local("ngram", serves=SERVES).worker
    arguments = Arguments.of(worker.params, worker.state)

    def kept(programs, folder=folder):
        return KeptKinds.of(folder, programs, arguments, 8)

    assert kept(Compiled(worker.config, cuts=False)) is not None
    assert kept(Compiled(worker.config, cuts=False), None) is None
    assert kept(Compiled(worker.config, cuts=True)) is None
    assert kept(Compiled(replace(worker.config, accept=len), cuts=False)) is None
    assert kept(Compiled(replace(worker.config, model=object()), cuts=False)) is None


READ_AGAIN = """
import sys, jax
from pathlib import Path
from jax_specdec.device.worker.kept_kinds import KeptKinds, compiled_anew, not_kept_twice

folder = Path(sys.argv[1])
for name, value in (
    ("jax_compilation_cache_dir", sys.argv[1]),
    ("jax_persistent_cache_min_compile_time_secs", 0.0),
    ("jax_persistent_cache_min_entry_size_bytes", -1),
):
    jax.config.update(name, value)
kept = KeptKinds(folder, "digest")

def twice(x):
    return (2 * x).sort()

def anew():
    return compiled_anew(jax.jit(twice).lower(jax.ShapeDtypeStruct((9,), "float32")))

with not_kept_twice():
    program = anew()
    assert program.is_new
kept.save(None, {"a": program})
assert kept.load(None) is not None
kept.path(None).unlink()
assert not [*folder.glob("jit_twice*")]
jax.clear_caches()
assert anew().is_new  # and jax keeps it
assert [*folder.glob("jit_twice*")]
jax.clear_caches()
program = anew()
assert not program.is_new
assert not anew().is_new  # nor is what it has in memory
kept.save(None, {"a": program})  # it lacks functions, so it is not kept
assert not kept.has(None)
"""


def test_programs_that_jax_has_read_are_not_kept_again(tmp_path):
    output_of(READ_AGAIN, tmp_path, timeout=120)


def test_kinds_are_kept_where_a_worker_was_told_to(tmp_path, monkeypatch):
    """Not in a folder that the user gave to jax, who then decides who writes there."""
    name = "jax_compilation_cache_dir"
    before = jax.config.values[name]
    try:
        jax.config.update(name, str(tmp_path))
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
        assert compilation_cache.folder() == tmp_path
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
        assert compilation_cache.folder() is None
        jax.config.update(name, None)
        assert compilation_cache.folder() is None
    finally:
        jax.config.update(name, before)
