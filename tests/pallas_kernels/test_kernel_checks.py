"""The oracle and the checks of a device notice what is wrong, and name it.

XLA stands in for the kernels, and each check is given kernels that are wrong. `tests/rehearsal`
runs these checks on the kernels' own code, right and wrong. What fails in other libraries beside
the kernels is said, and ends nothing.
"""

import importlib.metadata
import itertools
import sys
import tomllib
import zipfile
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.cli import device_report
from pallas_kernels import TopkLogprobs
from pallas_kernels.backends.mosaic_gpu import cluster_kernel
from pallas_kernels.backends.mosaic_gpu.schedule import choose_schedule
from pallas_kernels.testing import checks, ground, oracle, peers, pieces, times
from pallas_kernels.testing.chips import GPUS
from pallas_kernels.testing.pieces import CHECK_PARTS
from pallas_kernels.testing.shapes import VOCABULARIES, Shape
from tests.rehearsal import peer_signatures, peer_stand_ins
from tests.support.paths import ROOT


@pytest.mark.fast
def test_the_oracle_holds_to_the_stated_bound():
    assert (oracle.ABSOLUTE_ERROR, oracle.RELATIVE_ERROR) == (1e-5, 2e-7)
    exact = np.array([-50.0])
    oracle.assert_logprobs_close((exact + 1.9e-5).astype(np.float32), exact)
    with pytest.raises(AssertionError):
        oracle.assert_logprobs_close((exact + 2.7e-5).astype(np.float32), exact)


@pytest.mark.fast
def test_oracle_comparison_can_fail():
    """Negative control: a wrong id, rank, logprob or NaN is noticed."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(3, 50)) * 4
    expected = oracle.topk_logprobs(x, [1, 2, 3], 4)
    good = TopkLogprobs(*(np.float32(x) if x.dtype == float else x for x in expected[:4]))
    oracle.assert_matches(good, expected)

    def changed(part, place, value):
        array = np.array(getattr(good, part))
        array[place] = value
        return good._replace(**{part: array})

    for bad in (
        changed("token_ids", (1, 2), good.token_ids[1, 2] + 1),
        changed("token_ranks", 0, good.token_ranks[0] + 1),
        changed("logprobs", (2, 1), good.logprobs[2, 1] + np.float32(3e-5)),
        changed("logprobs", (2, 1), np.nan),
        changed("logprobs", (2, 1), -np.inf),
        good._replace(logprobs=good.logprobs.astype(np.float64)),
    ):
        with pytest.raises(AssertionError):
            oracle.assert_matches(bad, expected)


BY_XLA = checks.by_name("xla")
SHAPE = Shape(4, 1400, 5, "float32")


def with_wrong(call, fields):
    """`call`, with fields of its results changed by functions of the right ones."""

    def wrong(*given, **options):
        found = call(*given, **options)
        there = {name: getattr(found, name) for name in fields}
        return found._replace(
            **{name: fields[name](x) for name, x in there.items() if x is not None and x.size}
        )

    return wrong


ONCE = jax.jit(checks.topk_of_whole_rows, static_argnums=0)


def told(part, kernels):
    """What the pieces' process says of a check; every check of rows has the same programs."""
    lines, of_rows = [], part in ("rows", "changes", "edges")
    own = SimpleNamespace(**vars(jax) | ({"jit": lambda call: call} if of_rows else {}))
    piece = pieces.Piece(part, lambda: pieces.CHECK_PARTS[part].check(kernels, SHAPE))
    with mock.patch.multiple(checks, jax=own, topk_of_whole_rows=ONCE):
        pieces.check_pieces([piece], lines.append)
    assert lines[0] == {"begin": part}
    return lines[1]


@pytest.mark.parametrize(
    "part", ["rows", "turns", "greedy", "changes", "edges", "groups", "candidates", "ranks"]
)
def test_right_kernels_pass(part):
    assert told(part, BY_XLA)["ok"]


@pytest.mark.parametrize(
    ("part", "fields", "said"),
    [
        ("rows", {"token_ranks": lambda x: x + 1}, "token_ranks"),  # off by one
        ("rows", {"logprobs": lambda x: x.at[0, 2].add(1e-4)}, "logprobs"),
        ("rows", {"extra_logprobs": lambda x: x.at[0, 0].add(1e-4)}, "extra_logprobs"),
        ("rows", {"entropy": lambda x: x + 1e-4}, "AssertionError"),
        ("rows", {"log_sum_exp": lambda x: x + 1e-4}, "logprobs differ"),
        ("edges", {"token_ids": lambda x: x.at[1, 1:].set(x[1, :0:-1])}, "token_ids"),  # of ties
        ("greedy", {"token_ids": lambda x: x.at[:, 0, 0].add(1)}, "token_ids"),
        ("greedy", {"token_ranks": lambda x: x + 1}, "token_ranks"),
        ("greedy", {"logprobs": lambda x: x.at[0, 0, 2].add(1e-4)}, "logprobs"),
        ("greedy", {"extra_logprobs": lambda x: x + 1e-4}, "extra_logprobs"),
    ],
)  # fmt: skip
def test_a_wrong_result_is_named(part, fields, said, monkeypatch):
    kernels = replace(BY_XLA, topk=with_wrong(BY_XLA.topk, fields))
    if part == "greedy":
        kernels, emitted = BY_XLA, with_wrong(checks.emitted_logprobs, fields)
        monkeypatch.setattr(checks, "emitted_logprobs", emitted)
    found = told(part, kernels)
    assert not found["ok"]
    assert said in found["error"]


def test_one_call_of_many_with_other_bits_is_a_race():
    """The 37th call on two inputs in turn has a bit of the other input's."""
    number = itertools.count(-2)  # the first calls are compared with

    def topk(rows, outputs):
        found = BY_XLA.topk(rows, outputs)
        changed = jax.pure_callback(
            lambda x: np.int32(next(number) == 37), jax.ShapeDtypeStruct((), "int32"), rows.logits
        )
        return found._replace(token_ranks=found.token_ranks.at[1].add(changed))

    with pytest.raises(AssertionError, match=r"calls \[37\] of 50 have other bits"):
        checks.check_turns(replace(BY_XLA, topk=topk), SHAPE, calls=50)


@pytest.mark.fast
def test_default_pieces_take_every_form_of_a_call():
    """Edges in two launches and as clusters of 8; rows and turns in every form that calls have."""

    def form(shape):
        schedule = choose_schedule(shape.rows, shape.vocabulary, shape.k, shape.dtype)
        return schedule.programs if cluster_kernel.fits_cluster(schedule) else 0

    def forms(part):
        return [form(shape) for shape in CHECK_PARTS[part].shapes]

    vocabularies = *VOCABULARIES.values(), 32_768, 65_024, 100_352
    calls = {form(Shape(r, v, 20, "bfloat16")) for v in vocabularies for r in range(1, 600)}
    assert calls == {0, 2, 4, 5, 6, 7, 8}
    assert [programs > 1 for programs in forms("edges")] == [False, True] * 3
    for part in ("rows", "turns"):
        assert set(forms(part)) == calls
        assert 133 in [shape.rows for shape in CHECK_PARTS[part].shapes]


@pytest.mark.fast
def test_default_times_have_every_size():
    shapes = [shape for job, shape in times.SHAPES if job == times.TOPK]
    assert {shape.rows for shape in shapes} == {1, 8, 64, 256, 1536}
    assert {shape.vocabulary for shape in shapes} == {32_000, 128_256, 151_936}
    assert {shape.k for shape in shapes} == {0, 5, 20, 128}


@pytest.mark.parametrize("backend", ["mosaic_gpu", "mosaic_tpu"])
def test_every_part_has_pieces(backend):
    kernels = checks.by_name(backend)

    def names(part, **how):
        return [one.name for one in pieces.pieces_of(part, kernels, backend, **how)]

    for part in pieces.parts_of(backend):
        few, many = (names(part, full=full, rehearse=False) for full in (False, True))
        assert few == many[: len(few)]
        assert len(set(many)) == len(many)
        assert len(names(part, full=True, rehearse=True)) == 1 or part == pieces.PEERS


def test_what_is_no_wrong_answer_ends_the_process():
    """The device's context may be broken, and what follows would be blamed for it."""
    lines, effects = [], (AssertionError("a rank"), None, RuntimeError("CUDA_ERROR"), None)
    every = zip("abcd", (mock.Mock(side_effect=effect) for effect in effects), strict=True)
    pieces.check_pieces([pieces.Piece(*one) for one in every], lines.append)
    ends = [(line["piece"], line["ok"]) for line in lines if "piece" in line]
    assert ends == [("a", False), ("b", True), ("c", False)]
    assert lines[-1]["error"] == "RuntimeError: CUDA_ERROR"


def test_a_platform_that_does_not_start_is_named(monkeypatch):
    def devices(platform):
        if platform == "cuda":
            raise RuntimeError("Backend 'cuda' failed to initialize: driver too old\n\nSee there.")
        raise RuntimeError("Unknown backend tpu")

    monkeypatch.setattr(ground.jax, "devices", devices)
    obstacle = ground.facts(full=False)["obstacle"]
    why = "Backend 'cuda' failed to initialize: driver too old See there."
    assert obstacle == f"jax finds no GPU and no TPU here: {why}"


def test_a_timed_program_keeps_its_calls():
    """Nothing is moved out of the loop or left out, though no result is used; it turns as often as
    it says, which XLA knows: else a GPU's host would look after each turn."""

    def call(x, rows, ids):
        return jax.lax.top_k(jnp.exp(x[rows]), 7), jnp.sum(jnp.sin(x[rows]), axis=1)

    buffers = times.Buffers((jnp.ones((6, 64)),) * 2, 3, jnp.zeros(2, jnp.int32))
    program = jax.jit(times.in_one_program(call, buffers, 4))
    compiled = program.lower(buffers.ids, *buffers.logits).compile().as_text()
    body = compiled[: compiled.index("ENTRY")]
    for operation in ("exponential", "sine"):
        assert body.count(f" {operation}(") >= 2, operation
        assert f" {operation}(" not in compiled[compiled.index("ENTRY") :]
    assert 'known_trip_count":{"n":"12"}' in compiled


def test_a_timed_program_calls_on_all_rows():
    seen = []

    def call(x, rows, ids):
        jax.debug.callback(lambda rows: seen.append(rows.tolist()), rows, ordered=True)
        return x[rows, 0] + ids

    logits = jnp.arange(12.0).reshape(6, 2)
    answers, _ = times.timed(call, times.Buffers((logits,), 3, jnp.zeros(2)), rehearse=True)
    assert answers.tolist() == [0, 2]
    assert seen[:3] == [[4, 5], [2, 3], [0, 1]]


@pytest.mark.fast
@pytest.mark.parametrize("shape", [one for _, one in times.SHAPES])
def test_a_program_reads_more_than_a_cache_holds_for_two_ms(monkeypatch, shape):
    """Of chips that there are; calls that name their rows have them in one array."""
    monkeypatch.setattr(checks, "random_logits", lambda x, _: lowered_array(x))
    monkeypatch.setattr(checks, "random_ids", lambda _: None)
    for whole in (True, False):
        buffers = times.buffers_of(shape, array_a_call=whole)
        assert (len(buffers.logits) == 1) != whole or buffers.calls == 1
        assert buffers.nbytes > 2 * max(gpu.cache for gpu in GPUS.values())
        fastest = max(gpu.bandwidth for gpu in GPUS.values())
        assert times.turns_of(buffers) * buffers.nbytes / fastest >= 2e-3


def lowered_array(shape):
    size = shape.rows * shape.vocabulary * jnp.dtype(shape.dtype).itemsize
    return SimpleNamespace(nbytes=size)


def test_a_contender_with_another_answer_is_not_timed():
    right = ONCE(checks.Outputs(2), checks.Rows(jnp.ones((2, 9)), jnp.zeros(2, jnp.int32)))
    right = jax.tree.map(np.asarray, right)
    times.check_answers("ours", right, right)
    for wrong in (
        right._replace(token_ranks=right.token_ranks + 1),
        right._replace(logprobs=right.logprobs + 1e-3),
        right._replace(token_ids=right.token_ids[:, ::-1]),
    ):
        with pytest.raises(AssertionError, match="ours's"):
            times.check_answers("ours", right, wrong)


PEERS_SHAPE = Shape(2, 600, 3, "float32")
NAME = "log_softmax + tokamax top_k"


MODULE = "tokamax._src.ops.topk.api"


def stand_in(monkeypatch, top_k):
    """A library of this top K in place of tokamax."""
    for module in ("tokamax", MODULE):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(top_k=top_k, __spec__=module))


def peer_told():
    """What the pieces' process says of the peer."""
    lines = []
    piece = pieces.Piece(
        "a peer", lambda: peers.measure_peers(NAME, times.TOPK, PEERS_SHAPE, rehearse=True)
    )
    pieces.check_pieces([piece], lines.append)
    return lines[-1]


def test_a_peer_is_timed_behind_its_answer(monkeypatch):
    stand_in(monkeypatch, peer_stand_ins.tokamax_top_k)
    found = peer_told()
    assert found["ok"]
    assert found["figures"]["us"].keys() == {NAME}
    assert found["figures"]["us"][NAME] > 0


def wrong_top_k(x, k, **options):
    return tuple(0 * part for part in peer_stand_ins.tokamax_top_k(x, k, **options))


@pytest.mark.parametrize(("top_k", "error"), [
    (wrong_top_k, "AssertionError: Not equal to tolerance"), (None, "ModuleNotFoundError: "),
    (mock.Mock(side_effect=MemoryError("80 GB")), "MemoryError: 80 GB"),
])  # fmt: skip
def test_a_peer_that_is_wrong_fails_or_has_moved(top_k, error, monkeypatch):
    stand_in(monkeypatch, top_k)
    if top_k is None:
        monkeypatch.delitem(sys.modules, MODULE)
    assert peer_told()["error"].startswith(error)


@pytest.mark.fast
def test_an_argument_that_a_library_changed_is_named(tmp_path):
    """Its name, kind or default; a file or function that is not there any more."""
    (library,) = [x for x in peer_stand_ins.LIBRARIES if x.distribution == "sglang"]

    def told(source, file="sglang/srt/layers/logsumexp.py"):
        wheel = tmp_path / "a.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(file, source)
        return peer_signatures.wrong(library, wheel)

    assert told("def row_logsumexp_topk(x: Tensor, k: int) -> None: ...") is None
    for other in ("(x, num)", "(x, *, k)", "(x, k=5)", "(x, k, sorted)"):
        assert "takes" in told(f"def row_logsumexp_topk{other}: ...")
    assert told("def row_logsumexp(x): ...") == "there is no row_logsumexp_topk"
    assert told("", "sglang/layers.py") == "there is no sglang/srt/layers/logsumexp.py"


@pytest.mark.fast
def test_what_is_not_installed_is_no_piece(monkeypatch):
    def names():
        every = pieces.pieces_of(
            pieces.PEERS, checks.by_name("xla"), "mosaic_tpu", full=False, rehearse=False
        )
        return [one.name for one in every]

    assert peers.missing("mosaic_tpu") == {NAME: "tokamax"}
    assert names() == []
    stand_in(monkeypatch, peer_stand_ins.tokamax_top_k)
    assert peers.missing("mosaic_tpu") == {NAME: None}
    assert len(names()) == 2
    assert all(name.startswith(f"{device_report.PEERS}: {NAME}: topk_logprobs") for name in names())


@pytest.mark.fast
def test_a_checkout_that_is_not_installed_has_its_version(monkeypatch, tmp_path):
    none = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    monkeypatch.setattr(importlib.metadata, "version", none)
    assert ground._versions()["jax-specdec"] == f"{version} (a checkout)"
    assert ground._versions()["torch"] == "NOT INSTALLED"
    monkeypatch.setattr(ground, "__file__", str(tmp_path / "a/b/ground.py"))
    assert ground._versions()["jax-specdec"] == "NOT INSTALLED"
    for text in ("", "[project", "[project]\nname = 'another'\nversion = '1'"):
        (tmp_path / "pyproject.toml").write_text(text)
        assert ground._versions()["jax-specdec"] == "NOT INSTALLED"
