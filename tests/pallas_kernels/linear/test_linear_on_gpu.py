"""The fused kernel of `linear_topk_logprobs`, interpreted: its sums, and who waits for whom.

The interpreter gives each program of a pair the whole head. That of jax 0.10.2 multiplies without
the matrix unit; that of 0.12 has wgmma. Machine code is checked by
`python -m bench.aot_linear --check`, what an H100 alone could show by `python -m bench.gpu_check`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import linear_topk_logprobs
from pallas_kernels.backends.mosaic_gpu import compat, linear_groups, linear_products, linear_tiles
from pallas_kernels.linear import forward, on_gpu
from pallas_kernels.linear.definition import Definition
from pallas_kernels.linear.read_columns import Rows
from pallas_kernels.linear.types import Call, Inputs
from pallas_kernels.meshes.vocab_shard import WHOLE
from pallas_kernels.testing import oracle
from tests.support import linear_cases, quick_compile
from tests.support.watched_interpreters import watched

NAMES = ["bias", "token_ids", "row_ids", "num_rows", "temperatures", "extra_token_ids"]
CALL = Call(Definition(), 0, True, WHOLE, None, "mosaic_gpu")


@pytest.fixture
def interpreted(monkeypatch):
    """One multiprocessor, so that a program makes several tiles; programs are compiled quickly."""
    monkeypatch.setattr(on_gpu, "MULTIPROCESSORS", 1)
    with quick_compile.everything():
        yield


def run_watched(call, hidden, head, **given):
    """The call by the interpreted kernels, and whether one of them had a race."""
    given.setdefault("extra_token_ids", jnp.zeros((len(given["token_ids"]), 0), jnp.int32))
    arrays = [given.get(name) for name in NAMES]
    params = compat.interpret_params(detect_races=True)
    program = jax.jit(lambda *given: forward.topk_logprobs(call, Inputs(*given), params))
    with watched() as raced:
        found = jax.block_until_ready(program(hidden, head, *arrays))
    return found, raced()


def run(call, hidden, head, **given):
    found, raced = run_watched(call, hidden, head, **given)
    assert not raced
    return found


def in_steps(x):
    """x [.., H] in bfloat16, with zeros up to a multiple of what is loaded at a time."""
    missing = -x.shape[1] % linear_tiles.STEP
    return jnp.pad(x, ((0, 0), (0, missing))).astype(jnp.bfloat16)


@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")  # jax 0.12, by NumPy
def test_every_edge(interpreted):
    """Ties, NaN, infinities, rows and ids that are skipped, temperatures; a last group of 88."""
    width = 600
    logits = np.array(jnp.asarray(oracle.edge_rows(width, np.float32, 8), jnp.bfloat16), np.float32)
    rng = np.random.default_rng(0)
    given = {
        "token_ids": rng.integers(0, width, 11).astype(np.int32),
        "row_ids": np.array([0, 1, 2, 3, 4, 5, 6, -1, 7, 1, 0], np.int32),
        "temperatures": np.array([1, 0.5, 2, 1, 1, 1, 1, 1, 1, 0, -1], np.float32),
        "extra_token_ids": rng.integers(-1, width + 1, (11, 1)).astype(np.int32),
        "num_rows": np.int32(10),
    }
    given["token_ids"][9] = width
    rest = {name: value for name, value in given.items() if name != "token_ids"}
    expected = oracle.topk_logprobs(logits, given["token_ids"], 0, **rest)
    arrays = {name: jnp.asarray(value) for name, value in given.items()}
    found = run(CALL, *map(in_steps, linear_cases.factors(logits)), **arrays)
    oracle.assert_matches(found, expected)


def random_case(rows=133, width=304, size=320, seed=1):
    """More steps than stages; a pair of tiles, of which the second begins inside the first."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(rows, size)), jnp.bfloat16)
    head = jnp.asarray(rng.normal(size=(width, size)) * 0.1, jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=width), jnp.float32)
    ids = jnp.asarray(rng.integers(0, width, rows), jnp.int32)
    return hidden, head, bias, ids


def test_definition_in_float64(interpreted):
    """Scale, bias, temperatures, entropy; ranks differ at near-ties alone, by 1e-5."""
    hidden, head, bias, ids = random_case()
    t = np.linspace(0.5, 2, len(hidden)).astype(np.float32)
    call = CALL._replace(definition=Definition(0.7))
    found = run(call, hidden, head, bias=bias, token_ids=ids, temperatures=jnp.asarray(t))
    x = 0.7 * np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T + np.asarray(bias)
    y = x / t[:, None]
    log_sum_exp = np.log(np.exp(y).sum(1))
    p = np.exp(y - log_sum_exp[:, None])
    own = np.take_along_axis(x, np.asarray(ids)[:, None], 1)
    np.testing.assert_allclose(found.log_sum_exp, log_sum_exp, atol=1e-5)
    np.testing.assert_allclose(found.logprobs, own / t[:, None] - log_sum_exp[:, None], atol=1e-5)
    entropy = log_sum_exp - (p * y).sum(1)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-5)
    above, certain = (x > own - 1e-5).sum(1), 1 + (x > own + 1e-5).sum(1)
    ranks = np.asarray(found.token_ranks)
    assert ((certain <= ranks) & (ranks <= above)).all()
    assert (ranks == 1 + (x > own).sum(1)).mean() > 0.99


def exact_case(dtype, width=304, rows=7, seed=2):
    """Products that float32 has exactly, and so logits [rows, width] known in this dtype."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.integers(-3, 4, (rows, 64)), jnp.bfloat16)
    head = jnp.asarray(rng.integers(-8, 9, (width, 64)), jnp.bfloat16)
    scale = 1 / 64 + 1 / 4096
    exact = np.asarray(hidden, np.float32) @ np.asarray(head, np.float32).T * np.float32(scale)
    logits = np.array(jnp.asarray(exact).astype(dtype), np.float32)
    assert (logits != exact).any()  # else nothing is rounded
    return Definition(scale, None, dtype), hidden, head, logits


def test_padding_and_rounding(interpreted):
    """Logits are rounded once; tokens from a limit on, a part of a group, do not count."""
    definition, hidden, head, logits = exact_case("float16", width=800)
    call = CALL._replace(definition=definition, shard=dataclasses.replace(WHOLE, vocab_size=300))
    ids = jnp.asarray([0, 299, 300, 256, 255, -1, 799], jnp.int32)
    found = run(call, hidden, head, token_ids=ids)
    oracle.assert_matches(found, oracle.topk_logprobs(logits[:, :300], ids, 0))


def test_ranks_are_those_of_the_groups_logits(interpreted, monkeypatch):
    """A given token's logit that is wrong beforehand is found to be, and counted by again."""
    definition, hidden, head, logits = exact_case("bfloat16")
    ids = jnp.asarray(np.argsort(logits)[:, 150], jnp.int32)
    own = np.take_along_axis(logits, np.asarray(ids)[:, None], 1)
    computed = linear_groups.diagonal_logits

    def wrong(*arguments):
        return computed(*arguments) + 0.5

    monkeypatch.setattr(linear_groups, "diagonal_logits", wrong)
    call = CALL._replace(definition=definition, entropy=False)
    expected = oracle.topk_logprobs(logits, ids, 0)
    oracle.assert_matches(run(call, hidden, head, token_ids=ids), expected)
    params = compat.interpret_params(detect_races=False)
    rows = Rows(ids[:, None], jnp.asarray(own[:, 0] + 0.5), None)
    arrays = (definition, False, hidden, head, None, jnp.int32(304), rows)
    sums, found = jax.jit(lambda: on_gpu.read(*arrays, params))()
    assert (1 + sums.num_larger != expected.token_ranks).any()  # a count by it alone
    np.testing.assert_array_equal(found, own)


def test_races_would_be_seen(interpreted, monkeypatch):
    """A stage that is given free before it has been read may be overwritten by the next step."""

    def product_of_freed(steps, before, rows, tokens, full, free, half):
        def step(k, products):
            stage = lax.rem(before + k, linear_products.STAGES)
            compat.GPU.barrier_wait(full.at[stage])
            compat.GPU.barrier_arrive(free.at[stage])
            parts = rows[stage, half], tokens[stage]
            contracted = (((1,), (1,)), ((), ()))
            return products + lax.dot_general(
                *parts, contracted, preferred_element_type=jnp.float32
            )

        none = jnp.zeros((linear_products.HALF, linear_groups.GROUP), jnp.float32)
        return lax.fori_loop(0, steps, step, none)

    hidden, head, _, ids = random_case(9, 256, 640)
    monkeypatch.setattr(linear_products, "PLAIN", True)
    monkeypatch.setattr(linear_products, "_product_on_cpu", product_of_freed)
    assert run_watched(CALL, hidden, head, token_ids=ids)[1]


SIZES = [(128, 256, 64), (200, 304, 64), (1024, 151_936, 1024), (1200, 128_256, 8192),
         (8192, 50_264, 2048), (1160, 32_000, 4096)]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_every_logit_has_one_tile(sizes):
    """Every pair of a row's tile and a group once; all rows are read, each token of a group too."""
    tiles = linear_tiles.choose_tiles(*sizes)
    row_tile, group = map(np.asarray, tiles.place(np.arange(tiles.number)))
    both = [(r + i, g) for r, g in zip(row_tile, group, strict=True) for i in range(tiles.together)]
    assert sorted(both) == [(r, g) for r in range(tiles.row_tiles) for g in range(tiles.groups)]
    first = np.asarray(tiles.first_row(np.arange(tiles.row_tiles)))
    rows = np.concatenate([np.arange(start, start + linear_tiles.ROWS) for start in first])
    np.testing.assert_array_equal(tiles.of_rows(rows), np.arange(sizes[0]))
    start = np.asarray(tiles.first_token(np.arange(tiles.groups)))
    own = np.arange(tiles.groups) * linear_tiles.GROUP
    assert (start <= own).all()
    assert (start + linear_tiles.GROUP >= np.minimum(own + linear_tiles.GROUP, sizes[1])).all()
    assert (start >= 0).all()
    assert start.max() + linear_tiles.GROUP == sizes[1]


def test_neighbors_in_time_share_the_head():
    """Of 132 tiles that run at once, few groups; a band's rows stay in the cache."""
    tiles = linear_tiles.choose_tiles(8192, 151_936, 4096)
    assert tiles.together == 2
    _, group = tiles.place(np.arange(66))
    assert len(np.unique(group)) <= 66 // tiles.band + 2
    rows = tiles.band * tiles.together * linear_tiles.ROWS
    assert 2 * rows * tiles.size <= linear_tiles.BAND_BYTES


def test_where_more_than_sums_is_needed():
    """Halves that have a row's token in a group, the last group that begins early, the limit."""
    tiles = linear_tiles.choose_tiles(200, 1000, 64)
    token = np.full(200, -1, np.int32)
    token[[0, 150, 199]] = 300, 10, 999
    found = np.asarray(on_gpu.special_of(tiles, jnp.asarray(token), jnp.int32(1000)))
    found = found.reshape(2 * tiles.row_tiles, tiles.groups)
    expected = np.zeros_like(found)
    expected[0, 1] = 1  # row 0 is in the first half, token 300 in group 1
    expected[3, 0] = 1  # row 150 is in rows 136 to 199, the second half of the second tile
    expected[:, 3] = 1  # 1000 = 3 * 256 + 232
    np.testing.assert_array_equal(found, expected)
    limited = np.asarray(on_gpu.special_of(tiles, jnp.asarray(token), jnp.int32(600)))
    assert limited.reshape(found.shape)[:, 2].all()
    assert not limited.reshape(found.shape)[3, 1]


def lowered(platform="cuda", rows=256, size=128, width=1008, dtype=jnp.bfloat16, **options):
    def call(hidden, head, ids):
        return linear_topk_logprobs(
            hidden, head, ids, **{"k": 0, "implementation": "mosaic_gpu", **options}
        )

    shapes = ((rows, size), dtype), ((width, size), dtype), ((rows,), jnp.int32)
    arrays = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    return jax.jit(call).trace(*arrays).lower(lowering_platforms=(platform,))


def test_lowered_for_cuda():
    """Layouts and shared memory fit; the blocks' logits are nowhere."""
    text = lowered(entropy=True).as_text()
    assert text.count("mosaic_gpu") >= 3
    assert "256x1008" not in text


def test_gradient_lowered_for_cuda():
    """The kernels' log-sum-exp, and XLA's blocks."""
    arrays = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((1024, 64), jnp.bfloat16), ((4096, 64), jnp.bfloat16), ((1024,), jnp.int32)
        )
    )  # fmt: skip

    def loss(hidden, head, ids):
        found = linear_topk_logprobs(hidden, head, ids, 0, implementation="mosaic_gpu")
        return found.logprobs.sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    text = gradient.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 3
    assert "1024x4096" not in text


def test_lowered_on_a_mesh():
    """The head split over the vocabulary: each device's kernels read its own part."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    text = lowered(mesh=mesh, axis_name="model").as_text()
    assert text.count("mosaic_gpu") >= 3


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 1}, "no top K, and k = 1"),
        ({"dtype": jnp.float32}, "hidden and head are float32"),
        ({"soft_cap": 30.0}, "soft_cap = 30.0"),
        ({"head_axes": "HV", "size": 256, "width": 256}, "head_axes is 'HV'"),
        ({"size": 96}, "H = 96 is no multiple of 64"),
        ({"width": 248}, "a head of 248 tokens on a device is less"),
        ({"width": 500}, "a head of 500 tokens on a device is no multiple of 8"),
        ({"platform": "cpu"}, "there is no CUDA device here"),
    ],
)
def test_refused(change, words):
    with pytest.raises(NotImplementedError, match=f"cannot run: .*{words}.*; use 'xla' or None"):
        lowered(**change)


@pytest.mark.fast
@pytest.mark.parametrize("capability", [8.9, 10.0])
def test_refused_by_devices(monkeypatch, capability):
    """wgmma is an instruction of compute capability 9.0 alone."""
    monkeypatch.setattr(on_gpu.obstacles, "cuda_capability", lambda: capability)
    with pytest.raises(NotImplementedError, match=f"compute capability {capability}; it"):
        lowered()
