"""The way out: which implementation a call takes, and what happens where kernels cannot be made."""

import functools
import importlib
import warnings
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_specdec.control import IMPLEMENTATIONS
from pallas_kernels import gpu_obstacle, greedy, topk_logprobs, use_implementation
from pallas_kernels.backends import choose
from pallas_kernels.backends.mosaic_gpu import selection
from pallas_kernels.lowering.implementation import Implementation, in_force
from pallas_kernels.meshes.placement import Split
from pallas_kernels.meshes.split import on_own_part
from pallas_kernels.sampling import Drafts, Sampling, verify
from tests.support.lowered import text_of
from tests.support.processes import in_thread
from tests.support.proved_kernels import proved_kernels  # noqa: F401

X = jax.ShapeDtypeStruct((4, 4096), jnp.float32)
IDS = jax.ShapeDtypeStruct((4,), jnp.int32)
KERNEL = "custom_call @mosaic_gpu"


def call(logits, token_ids, implementation=None):
    return topk_logprobs(logits, token_ids, 5, implementation=implementation)


def sampled(logits, k=None):
    """A verification of one slot, whose rows' read has kernels."""
    ids = jnp.zeros((1, 3), jnp.int32)
    sampling = Sampling.greedy(1)._replace(temperature=jnp.ones(1))
    return verify(logits[None], Drafts(ids, jnp.int32([3])), sampling, jnp.int32([7]), k=k)


@pytest.mark.fast
def test_one_function_takes_another_implementation():
    """What was compiled under one value does not serve another: the value is in jit's key."""
    traced = []

    @jax.jit
    def one(x, ids):
        traced.append(None)
        return call(x, ids)

    x, ids = np.zeros(X.shape, X.dtype), np.zeros(4, np.int32)
    one(x, ids)
    with use_implementation("mosaic_gpu"), pytest.raises(NotImplementedError, match="no CUDA"):
        one(x, ids)
    with use_implementation("xla"):
        one(x, ids)
    assert len(traced) == 3
    one(x, ids)
    with use_implementation("xla"):
        one(x, ids)
    assert len(traced) == 3


@pytest.mark.chips
def test_kernels_of_a_program():
    """The context reaches every call that names none; one that names its own keeps it."""
    assert KERNEL in text_of(call, X, IDS)
    by_name = functools.partial(call, implementation="mosaic_gpu")
    with use_implementation("xla"):
        assert KERNEL not in text_of(call, X, IDS)
        assert KERNEL in text_of(by_name, X, IDS)
        assert "use_implementation('xla')" in gpu_obstacle(X)
        with use_implementation(None):
            assert KERNEL in text_of(call, X, IDS)
    with use_implementation("mosaic_gpu"):
        assert KERNEL in text_of(call, X, IDS)


@pytest.mark.chips
def test_a_context_inside_a_program():
    """What jax traces while it lowers, when the block was left, has its value."""

    def program(name, logits, token_ids):
        with use_implementation(name):
            return call(logits, token_ids), sampled(logits, k=2) if name == "xla" else None

    assert KERNEL not in text_of(functools.partial(program, "xla"), X, IDS)
    with use_implementation("xla"):
        assert KERNEL in text_of(functools.partial(program, "mosaic_gpu"), X, IDS)


@pytest.mark.fast
def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'cuda' is not known; choose one of 'xla'"):
        use_implementation("cuda")
    assert get_args(Implementation) == IMPLEMENTATIONS  # the engine's, which imports no jax


def test_what_the_compiler_calls_later_has_the_value():
    """With automatic axes, parts are traced while compiling: here in a thread without the value."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    logits = jax.ShapeDtypeStruct(
        (4, 2, 4096), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )
    values = []

    def seen(x):
        values.append(in_force())
        return greedy(x)

    def program(x):
        return on_own_part(lambda shard, x, _: seen(x.reshape(-1, 4096)), x, (), Split())

    with use_implementation("xla"):
        lowered = jax.jit(program).lower(logits)
    count = len(values)
    in_thread(lowered.compile)
    assert len(values) > count
    assert set(values) == {"xla"}


@pytest.fixture
def untried(monkeypatch):
    """As in a process that has lowered no kernel yet."""
    monkeypatch.setattr(choose, "_lowered", set())


def warned(function, *shapes):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        text = text_of(function, *shapes)
    return text, [str(one.message) for one in found]


@pytest.mark.fast
def test_kernels_that_cannot_be_imported(monkeypatch, untried):
    """As when jax moves what they import: XLA, and one warning; by name an error."""

    def moved(name):
        raise ImportError(f"cannot import name 'core_map' from {name!r}")

    monkeypatch.setattr(choose, "importlib", importlib)
    monkeypatch.setattr(importlib, "import_module", moved)

    def twice(x, ids, implementation=None):  # of K that no test has lowered before
        return [topk_logprobs(x, ids, k, implementation=implementation) for k in (13, 14)]

    text, found = warned(twice, X, IDS)
    assert KERNEL not in text
    assert len(found) == 1
    assert f"jax {jax.__version__}: ImportError: cannot import name 'core_map'" in found[0]
    with pytest.raises(NotImplementedError, match="cannot import name 'core_map'"):
        text_of(functools.partial(twice, implementation="mosaic_gpu"), X, IDS)


def test_kernels_that_cannot_be_lowered(monkeypatch, untried):
    """Nothing half lowered stays in the program, which is XLA's and whole."""
    long = jax.ShapeDtypeStruct((4, 131_072), jnp.float32)  # no test has lowered it before

    def program(x, ids, implementation=None):
        return topk_logprobs(x, ids, 127, implementation=implementation)

    expected = text_of(functools.partial(program, implementation="xla"), long, IDS)
    # More than shared memory holds.
    monkeypatch.setattr(selection, "capacity", lambda k: 1 << 15)
    text, found = warned(program, long, IDS)
    assert KERNEL not in text
    assert text.count("chlo.top_k") == expected.count("chlo.top_k") > 0
    assert len(found) == 1
    assert "shared memory" in found[0].lower()
    with pytest.raises(Exception, match=r"(?i)shared memory"):
        text_of(functools.partial(program, implementation="mosaic_gpu"), long, IDS)
