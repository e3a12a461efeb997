"""The XLA implementation: blocks by platform, many columns, subnormal logits, `jax.debug_nans`.

Its memory beside logits and outputs on a CPU: a quarter of the logits' bytes, or 8 MiB.
"""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy, topk_logprobs
from pallas_kernels.backends.xla import groups, selection
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.changes import Changes, apply, prepared
from pallas_kernels.contract.rows import Outputs
from pallas_kernels.sampling import Drafts, Sampling, verify
from pallas_kernels.testing import oracle
from tests.support import kernel_calls, programs, quick_compile
from tests.support.lowered import array, temporaries, text_of

ELSEWHERE = ("cuda", "rocm", "tpu")


def lowered(platform, rows, vocabulary, k, dynamic=False):
    """The program's text as lowered for a platform, which need not be here."""

    def call(logits, ids, count):
        num_rows = count if dynamic else None
        return topk_logprobs(logits, ids, k, num_rows=num_rows, implementation="xla")

    given = array((rows, vocabulary), "bfloat16"), array((rows,)), array(())
    return text_of(call, *given, platform=platform)


def loops(text):
    return len(re.findall(r"stablehlo\.while", text))


@pytest.mark.parametrize("platform", ELSEWHERE)
def test_up_to_256_rows_are_one_block_on_a_gpu(platform):
    for k in (0, 20):
        assert loops(lowered(platform, 256, 151_936, k)) == 0
    text = lowered(platform, 1536, 131_072, 20, dynamic=True)
    assert loops(text) == 1
    blocks = {int(rows) for rows in re.findall(r"tensor<(\d+)x131072xbf16>", text)} - {1536}
    assert blocks == {512 if platform == "tpu" else 384}


def test_a_greedy_choice_is_made_as_suits_the_platform():
    """No loop of a CPU's blocks on other platforms; the control is a program for a CPU."""

    def call(logits):
        return topk_logprobs(logits, greedy(logits).token_ids, 5, implementation="xla")

    logits = array((256, 151_936), "bfloat16")
    found = [loops(text_of(call, logits, platform=name)) for name in (*ELSEWHERE, "cpu")]
    assert found == [0, 0, 0, 2]


def test_a_gpu_reads_a_known_number_of_rows_at_once():
    for k, expected in ((0, 0), (20, 0), (512, 1)):  # there, temporaries would be too large
        assert loops(lowered("cuda", 1536, 131_072, k)) == expected


@pytest.mark.parametrize("way", ["GPU", "TPU"])
def test_each_platforms_program_gives_the_oracles_answer(way, monkeypatch):
    """Run on this machine, with ties, invalid rows, two blocks and a vocabulary that is odd."""
    vocabulary, group = 2003, 16
    x = np.concatenate([oracle.edge_rows(vocabulary, "float32", group)] * 2)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16))
    ids = np.arange(14, dtype=np.int32) * 143
    extra = np.array([[9, -1]] * 14, np.int32)
    temperatures = np.array([1, 0, 0.5, 2, 1, 1, 3] * 2, np.float32)
    chosen = getattr(xla, way)._replace(block_rows=lambda *_: 9)
    options = {"temperatures": temperatures, "extra_token_ids": extra, "num_rows": np.int32(13)}

    @quick_compile.jit
    def call(x, ids, temperatures, extra, num_rows):
        kernels = SimpleNamespace(
            row_sums=lambda rows, selected, outputs: xla._row_sums(chosen, outputs, rows, selected)
        )
        given = (None, num_rows, temperatures, extra)
        return kernel_calls.topk_logprobs(kernels, x, ids, Outputs(20), *given)

    found = call(x, ids, temperatures, extra, np.int32(13))
    expected = oracle.topk_logprobs(x, ids, 20, **options)
    # A CPU adds the others' terms one by one, so here their sums are less exact.
    for name in ("token_ids", "token_ranks", "logprobs", "extra_logprobs"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-4)


def test_groups_fit_their_vocabulary():
    for vocabulary in (1, 7, 8, 100, 600, 2048, 32_000, 50_257, 262_144):
        for k in (0, 1, 5, 20, 128, 512):
            if k <= vocabulary and (width := selection.group_width(vocabulary, k)) is not None:
                assert k <= -(-vocabulary // width)
                assert width <= vocabulary


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_subnormal_logits_keep_their_order(dtype):
    """XLA's CPU programs read them as zero in float arithmetic."""
    smallest = {"float32": 2.0**-149, "bfloat16": 2.0**-133, "float16": 2.0**-24}[dtype]
    tiny = np.array([3, -2, 0, 1, 5, 2, -1, 5]) * smallest
    x = np.full((4, 3000), -1.0)
    x[0, :8] = x[1, 500:508] = tiny
    x[2], x[3] = np.tile(tiny, 375), -np.abs(np.tile(tiny, 375))
    x = x.astype(jnp.dtype(dtype))
    ids = np.array([3, 505, 1, 2], np.int32)
    oracle.assert_matches(programs.topk_logprobs(x, ids, 12), oracle.topk_logprobs(x, ids, 12))
    expected = [oracle.greedy_token_id(row) for row in x]
    assert expected == [4, 504, 4, 2]  # by hand
    np.testing.assert_array_equal(programs.greedy(x).token_ids, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("number", [5, 39])  # rows, counted one by one and four at a time
def test_larger_logits_of_listed_rows(number, changed, dtype):
    rng, vocabulary = np.random.default_rng(number), 131
    x = jnp.asarray(rng.choice([-np.inf, -2.0, -0.0, 0.0, 1e-40, 3.0], (number, vocabulary)), dtype)
    ids = np.where(rng.random(number) < 0.8, rng.integers(0, vocabulary, number), -1)
    bias_ids = rng.integers(-1, vocabulary, (number, 2)).astype(np.int32)
    bias = rng.normal(0, 2, bias_ids.shape).astype(np.float32)
    changes = None
    if changed:
        changes = Changes(bias_token_ids=jnp.asarray(bias_ids), bias=jnp.asarray(bias))
        changes = prepared(changes, vocabulary)
    count = jax.jit(groups.larger_than_tokens)(x, ids.astype(np.int32), changes)
    values = np.asarray(x if changes is None else apply(x, changes)).astype(np.float64)
    selected = np.take_along_axis(values, np.maximum(ids, 0)[:, None], 1)
    np.testing.assert_array_equal(count, np.where(ids < 0, 0, (values > selected).sum(1)))


def test_nothing_is_nan_where_skipped_rows_are_replaced():
    """`jax.debug_nans` looks at what a jitted function returns, and not inside."""
    x, ids = jnp.zeros((3, 50)), jnp.zeros(3, jnp.int32)

    @jax.jit
    def replaced(x, ids):
        found = topk_logprobs(x, ids, 2, num_rows=2)
        return jnp.where(found.token_ranks[:, None] > 0, found.logprobs, 0.0)

    with jax.debug_nans(True):
        assert replaced(x, ids).shape == (3, 3)
        with pytest.raises(FloatingPointError):
            topk_logprobs(x, ids, 2, num_rows=2)


def limit(logits):
    """Bytes."""
    return max(8 << 20, 0.25 * logits.size * logits.dtype.itemsize)


@pytest.mark.parametrize(("rows", "vocabulary", "dtype", "dynamic"), [
    (24, 32_000, "bfloat16", True), (64, 131_072, "float32", False),
    (64, 50_257, "bfloat16", True), (64, 50_257, "float32", False),
    (1536, 151_936, "float32", True), (1536, 151_936, "bfloat16", False),
])  # fmt: skip
def test_temporaries_are_a_share_of_the_logits(rows, vocabulary, dtype, dynamic):
    """With row_ids and a dynamic row count too; and the greedy choice."""
    logits, ids = array((rows, vocabulary), dtype), array((rows,))

    def call(logits, token_ids, row_ids, num_rows):
        given = {"row_ids": row_ids, "num_rows": num_rows, "extra_token_ids": row_ids[:, None]}
        given = given if dynamic else {}
        return topk_logprobs(logits, token_ids, 20, implementation="xla", **given)

    assert temporaries(call, logits, ids, ids, array(())) <= limit(logits)
    if rows < 1000:
        assert temporaries(greedy, logits) <= limit(logits)


def test_temporaries_of_changed_logits():
    """With a mask and a bias logits are copied block by block, never all; for a choice too."""
    logits, ids = array((512, 131_072), "bfloat16"), array((512,))

    def call(logits, ids, words):
        table = ids[:, None]
        changes = {"allowed": words, "bias_token_ids": table, "bias": table.astype(jnp.float32)}
        found = topk_logprobs(logits, ids, 20, entropy=True, implementation="xla", **changes)
        drafts, sampling = Drafts.none(512, 0, 131_072), Sampling.greedy(512)
        by_slot = jax.tree.map(lambda x: x[:, None], changes)
        return found, verify(
            logits[:, None], drafts, sampling, ids, all_greedy=True, axis_name=(), **by_slot
        )

    assert temporaries(call, logits, ids, array((512, 4096), "uint32")) <= limit(logits)
