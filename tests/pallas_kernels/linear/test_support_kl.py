"""`linear_support_kl`: values and gradients against float64, whole and in pieces, refusals."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import linear_support_kl
from pallas_kernels.linear import backward, divergence
from tests.support.lowered import array, temporaries

R, V, H, C = 9, 310, 16, 6
WHICH = ("forward", "reverse", "jensen_shannon")
HOW = {"scale": 0.7, "soft_cap": 6.0}


@functools.cache
def case(dtype="float32", count=C):
    """A teacher's likeliest tokens; one row has pads, one a token without probability."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(R, V)) * 2
    logprobs = teacher - np.log(np.exp(teacher).sum(axis=1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :count].astype(np.int32)
    support = np.take_along_axis(logprobs, ids, axis=1)
    ids[1, 4:], support[1, 4:] = -1, np.nan
    support[2, 3] = -np.inf
    hidden, head = rng.normal(size=(R, H)), rng.normal(size=(V, H)) * 0.5
    return {
        "hidden": jnp.asarray(hidden, dtype),
        "head": jnp.asarray(head, dtype),
        "bias": jnp.asarray(rng.normal(size=V), jnp.float32),
        "temperatures": jnp.asarray([0, *rng.uniform(0.5, 2, R - 1)], jnp.float32),
        "support_ids": jnp.asarray(ids),
        "support_logprobs": jnp.asarray(support, jnp.float32),
    }


def plain(which, hidden, head, bias, temperatures, support_ids, support_logprobs):
    """The definition from whole logits, in the precision of the arrays; [R]."""
    u = HOW["scale"] * (hidden @ head.T) + bias[None]
    x = HOW["soft_cap"] * jnp.tanh(u / HOW["soft_cap"])
    logprobs = jax.nn.log_softmax(x / jnp.where(temperatures == 0, 1, temperatures)[:, None])
    real = support_ids >= 0
    lp = jnp.where(real, support_logprobs, -jnp.inf).astype(logprobs.dtype)
    at = jnp.take_along_axis(logprobs, jnp.where(real, support_ids, 0), axis=1)
    named = (jnp.arange(V)[None, None] == support_ids[:, :, None]).any(axis=1)  # [R, V]
    rest = jax.nn.logsumexp(jnp.where(named, -jnp.inf, logprobs), axis=1)
    p = jnp.where(real, jnp.exp(lp), 0)
    p = jnp.concatenate([p, jnp.maximum(1 - p.sum(1, keepdims=True), 2.0**-24)], axis=1)
    q = jnp.concatenate([jnp.where(real, jnp.exp(at), 0), jnp.exp(rest)[:, None]], axis=1)

    def kl(a, b):
        some = (a > 0) & (b > 0)
        a, b = jnp.where(some, a, 1), jnp.where(some, b, 1)
        return jnp.where(some, a * jnp.log(a / b), 0).sum(axis=1)

    # Without `reverse` of row 2, whose teacher gives nothing to a token: that is infinite.
    if which == "forward":
        return kl(p, q)
    if which == "reverse":
        return kl(q, p)
    middle = (p + q) / 2
    return 0.5 * (kl(p, middle) + kl(q, middle))


DIFFERENTIABLE = ("hidden", "head", "bias", "temperatures")
FINITE = np.array([row != 2 for row in range(R)])


def value_and_gradients(function, arrays):
    """[R] of each row, and the gradients of a weighted sum over the rows that are finite."""
    weights = jnp.asarray(np.linspace(0.5, 2, R) * FINITE)

    def loss(parts):
        rows = function(**arrays | parts)
        return jnp.sum(jnp.where(FINITE, rows, 0) * weights.astype(rows.dtype)), rows

    parts = {name: arrays[name] for name in DIFFERENTIABLE}
    (_, rows), found = jax.value_and_grad(loss, has_aux=True)(parts)
    return rows, found


def exact(which, **options):
    with jax.enable_x64(True):
        arrays = {
            name: jnp.asarray(np.asarray(x, np.int64 if "ids" in name else np.float64))
            for name, x in case(**options).items()
        }
        return jax.tree.map(
            np.asarray, value_and_gradients(functools.partial(plain, which), arrays)
        )


def ours(which, pieces=None, **options):
    call = functools.partial(linear_support_kl, divergence=which, **HOW)
    if pieces is None:
        return value_and_gradients(call, case(**options))
    with (
        mock.patch.object(divergence, "backward_piece", return_value=pieces),
        mock.patch.object(backward, "backward_piece", return_value=pieces),
    ):
        return value_and_gradients(call, case(**options))


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("pieces", [None, 64], ids=["whole", "pieces"])
def test_values_and_gradients_are_those_of_float64(which, pieces):
    count = C if pieces is None else C + 1  # other shapes: traced anew
    rows, gradients = ours(which, pieces, count=count)
    expected, expected_gradients = exact(which, count=count)
    kept = np.ones(R, bool) if which != "reverse" else FINITE
    np.testing.assert_allclose(np.asarray(rows)[kept], expected[kept], rtol=2e-5, atol=2e-6)
    assert which != "reverse" or np.isinf(rows[2])
    for name in DIFFERENTIABLE:
        scale = np.abs(expected_gradients[name]).max()
        np.testing.assert_allclose(
            gradients[name], expected_gradients[name], rtol=0, atol=1e-5 * scale, err_msg=name
        )
    assert float(gradients["temperatures"][0]) == 0  # greedy is read as 1, a constant


def divergence_of(which, lp, lq):
    """[R] of log-probabilities [R, n]."""
    middle = np.logaddexp(lp, lq) - np.log(2)
    terms = {
        "forward": np.exp(lp) * (lp - lq),
        "reverse": np.exp(lq) * (lq - lp),
        "jensen_shannon": (np.exp(lp) * (lp - middle) + np.exp(lq) * (lq - middle)) / 2,
    }
    return terms[which].sum(axis=1)


@pytest.mark.parametrize("which", WHICH)
def test_a_rest_of_little_mass_keeps_its_digits(which):
    """The student's is a sum: 1 minus the support's probabilities would have lost it."""
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(R, H))
    head = rng.normal(size=(V, H))
    own = hidden @ head.T
    ids = np.argsort(-own, axis=1)[:, :C].astype(np.int32)
    arrays = {
        "hidden": jnp.asarray(5 * hidden, jnp.float32), "head": jnp.asarray(head, jnp.float32),
        "support_ids": jnp.asarray(ids),
        "support_logprobs": jnp.full((R, C), np.log(0.9 / C), jnp.float32),
    }  # fmt: skip
    x = np.asarray(arrays["hidden"], np.float64) @ np.asarray(arrays["head"], np.float64).T
    logprobs = x - np.logaddexp.reduce(x, axis=1, keepdims=True)
    named = np.zeros((R, V), bool)
    np.put_along_axis(named, ids, True, axis=1)
    lq = np.take_along_axis(logprobs, ids, axis=1)
    rest = np.logaddexp.reduce(np.where(named, -np.inf, logprobs), axis=1)
    assert rest.min() < np.log(2.0**-24)
    lq = np.concatenate([lq, rest[:, None]], axis=1)
    lp = np.log([0.9 / C] * C + [0.1])[None]
    found = linear_support_kl(**arrays, divergence=which)
    np.testing.assert_allclose(found, divergence_of(which, lp, lq), rtol=1e-4, atol=1e-5)


def test_equal_distributions_have_no_divergence_and_no_gradient():
    x = case()
    logits = np.asarray(x["hidden"] @ x["head"].T, np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    ids = np.argsort(-logprobs, axis=1)[:, :C].astype(np.int32)
    same = jnp.asarray(np.take_along_axis(logprobs, ids, axis=1), jnp.float32)
    for which in WHICH:
        value, by_hidden = jax.value_and_grad(
            lambda h, w=which: linear_support_kl(h, x["head"], ids, same, divergence=w).sum()
        )(x["hidden"])
        np.testing.assert_allclose(value, 0, atol=1e-5)
        np.testing.assert_allclose(by_hidden, 0, atol=1e-5)


@pytest.mark.parametrize("which", WHICH)
def test_a_split_vocabulary_gives_the_same(which):
    """Over two devices, unevenly: the last columns are padding, of any value."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("v",), axis_types=(AxisType.Auto,))
    x = case()
    padded = {
        name: jnp.pad(x[name], [(0, 2)] + [(0, 0)] * (x[name].ndim - 1), constant_values=50.0)
        for name in ("head", "bias")
    }
    split = {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("v")))
        for name, x in padded.items()
    }
    call = functools.partial(linear_support_kl, divergence=which, **HOW)
    rows, gradients = value_and_gradients(call, x)
    there = functools.partial(call, mesh=mesh, axis_name="v", vocab_size=V)
    found, by = jax.jit(functools.partial(value_and_gradients, there))(x | split)
    np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-6)
    for name in DIFFERENTIABLE:
        mine = np.asarray(by[name])[:V] if name in padded else by[name]
        np.testing.assert_allclose(mine, gradients[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_are_accumulated_in_float32(dtype):
    narrow = case(dtype)
    wide = {k: x.astype(jnp.float32) if k in ("hidden", "head") else x for k, x in narrow.items()}
    rows = linear_support_kl(**narrow, **HOW)
    np.testing.assert_allclose(rows, linear_support_kl(**wide, **HOW), rtol=1e-3, atol=1e-4)
    transposed = narrow | {"head": narrow["head"].T}
    found = linear_support_kl(**transposed, **HOW, head_axes="HV")
    np.testing.assert_allclose(found, rows, rtol=1e-5, atol=1e-6)


def test_rows_without_an_answer_are_nan_and_have_no_gradient():
    x = case()
    broken = x["hidden"].at[0].set(jnp.nan)
    mass = x["support_logprobs"].at[3].set(0.0)

    @jax.jit
    def rows(hidden, mass):
        more = {"hidden": hidden, "support_logprobs": mass, "temperatures": jnp.full(R, 0.5)}
        return linear_support_kl(**x | more, **HOW)

    found = rows(broken, mass)
    assert np.flatnonzero(np.isnan(found)).tolist() == [0, 3]
    by = jax.grad(lambda hidden: jnp.nansum(rows(hidden, mass)))(broken)
    assert not by[jnp.array([0, 3])].any()
    assert np.isfinite(by).all()


def wrong_support(row, **changes):
    x = case()
    found = {name: np.array(x[name]) for name in ("support_ids", "support_logprobs")}
    for name, value in changes.items():
        found[name][row] = value
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (lambda: wrong_support(0, support_ids=[V, 1, 2, 3, 4, 5]), r"\[0, 0\] = 310 is outside"),
        (lambda: wrong_support(4, support_ids=[7, 1, 7, 3, 4, 5]), "names 7 twice in row 4"),
        (lambda: wrong_support(5, support_logprobs=-1.0), "row 5 sum to 2.20728 as probabilities"),
        (lambda: wrong_support(5, support_logprobs=np.nan), "row 5 sum to nan"),
        (lambda: {"divergence": "symmetric"}, "'symmetric' must be one of 'forward', 'reverse'"),
        (
            lambda: {
                "support_ids": np.zeros((R, 0), np.int32),
                "support_logprobs": np.zeros((R, 0), np.float32),
            },
            "names 0 ids for each row",
        ),
    ],
)
def test_what_is_no_support_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        linear_support_kl(**case() | changes(), **HOW)


def test_known_supports_are_refused_where_a_program_is_traced():
    x = case()
    wrong = wrong_support(5, support_logprobs=0.0)
    with pytest.raises(ValueError, match="row 5 sum to 6"):
        jax.jit(lambda hidden: linear_support_kl(**x | wrong | {"hidden": hidden}))(x["hidden"])
    traced = jax.jit(lambda **arrays: linear_support_kl(**x | arrays))(**wrong)
    assert np.flatnonzero(np.isnan(traced)).tolist() == [5]


@pytest.mark.parametrize("which", WHICH)
def test_a_support_of_all_tokens_leaves_no_rest(which):
    rng = np.random.default_rng(2)
    hidden, head, teacher = (rng.normal(size=shape) for shape in ((3, H), (20, H), (3, 20)))
    lp, lq = (x - np.logaddexp.reduce(x, axis=1)[:, None] for x in (teacher, hidden @ head.T))
    ids = np.tile(np.arange(20, dtype=np.int32), (3, 1))
    narrow = [jnp.asarray(x, jnp.float32) for x in (hidden, head, lp)]
    found = linear_support_kl(*narrow[:2], ids, narrow[2], divergence=which)
    np.testing.assert_allclose(found, divergence_of(which, lp, lq), rtol=1e-5)
    less = np.asarray(narrow[2]) - np.float32([[0], [0.5], [0]])
    with pytest.raises(ValueError, match=r"row 1 name all 20 tokens and sum to 0.606531 as prob"):
        linear_support_kl(*narrow[:2], ids, less, divergence=which)
    jitted = jax.jit(lambda less: linear_support_kl(*narrow[:2], ids, less, divergence=which))
    assert np.isnan(jitted(less)).tolist() == [False, True, False]


@pytest.mark.parametrize("gradient", [False, True])
def test_no_array_of_the_logits_size_is_made(gradient):
    """Of 1,024 rows of a vocabulary of 32,768; the plain way's temporaries are the control."""
    rows, vocab, size, count = 1024, 32_768, 64, 64
    arrays = (
        array((rows, size), "float32"), array((vocab, size), "float32"),
        array((rows, count)), array((rows, count), "float32"),
    )  # fmt: skip

    def by_logits(hidden, head, ids, teacher):
        logprobs = jax.nn.log_softmax(hidden @ head.T)
        lq = jnp.take_along_axis(logprobs, ids, axis=1)
        return jnp.sum(jnp.exp(teacher) * (teacher - lq))

    def in_pieces(*arrays):
        return linear_support_kl(*arrays).sum()

    needed, ours = (
        temporaries(jax.grad(call, (0, 1)) if gradient else call, *arrays)
        for call in (by_logits, in_pieces)
    )
    logits = 4 * rows * vocab
    assert needed >= logits
    assert ours <= 0.1 * logits + 4 * vocab * size * gradient
