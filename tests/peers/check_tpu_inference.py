"""tpu-inference's own functions and the adapter's, and its own tests with ours in place."""

import os
import types
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec
from tpu_inference.layers.jax.sample import sampling
from tpu_inference.spec_decode.jax import utils

from jax_specdec.adapters import tpu_inference
from tests.support.processes import ended

MESH = jax.make_mesh((len(jax.devices()),), ("data",), (jax.sharding.AxisType.Auto,))
TESTS = (
    "tests/layers/jax/sample/test_logprobs_replication.py",
    "tests/layers/jax/sample/test_rejection_sampler.py",
    "tests/layers/jax/sample/test_sampling_metadata.py",
    "tests/layers/jax/sample/test_sampling.py",
    "tests/spec_decode/test_utils.py",
)
own = (sampling.compute_and_gather_logprobs, sampling.compute_and_gather_prompt_logprobs)
own_filter = utils.filter_speculative_logprobs
V, N, K = 40, 6, 5


@settings(max_examples=80)
@given(
    # Few different values: ties. Quarters are exact in bfloat16, and their differences in float32.
    hnp.arrays(np.int8, (N, V), elements=st.integers(-20, 20)),
    hnp.arrays(np.int32, N, elements=st.integers(-1, V - 1)),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.sampled_from([0, 1]),
    st.sampled_from([(), (None, "data")]),
)
def test_logprobs_ids_and_inclusive_ranks_are_theirs(quarters, tokens, dtype, which, split):
    logits = jnp.asarray(quarters / np.float32(4), dtype)
    logits = jax.device_put(logits, NamedSharding(MESH, PartitionSpec(*split)))
    mine = [getattr(tpu_inference, function.__name__) for function in own]
    with jax.set_mesh(MESH):
        # Their runner hands float32 over.
        expected = own[which](logits.astype(jnp.float32), tokens, K)
        found = mine[which](logits, tokens, K)
    read = tokens >= 0
    assert found[1].dtype == expected[1].dtype == jnp.float32
    np.testing.assert_array_equal(found[0][read], expected[0][read])
    np.testing.assert_allclose(found[1][read], expected[1][read], rtol=1e-6, atol=2e-6)
    # Theirs counts among logprobs, which are rounded once more: equal logits stay equal there.
    np.testing.assert_array_equal(found[2][read], expected[2][read])
    # Rejected drafts and padding are not read.
    assert (np.asarray(found[0])[~read] == -1).all()
    assert (np.asarray(found[2])[~read] == 0).all()


@settings(max_examples=200)
@given(st.data())
def test_the_rows_of_accepted_drafts_are_theirs(data):
    dp_size, slots = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    lengths = data.draw(hnp.arrays(np.int32, (dp_size, slots), elements=st.integers(0, 3)))
    block = int(lengths.sum(axis=1).max()) + data.draw(st.integers(0, 2))
    num_rows = dp_size * (block + slots)
    requests = data.draw(st.permutations(range(dp_size * slots)))
    lengths.reshape(-1)[requests.index(dp_size * slots - 1)] = 0  # padding has no drafts
    ids = data.draw(hnp.arrays(np.int32, (num_rows, 3), elements=st.integers(-1, 11)))
    found, expected = (
        function(
            ids,
            np.arange(num_rows * 3, dtype=np.float32).reshape(-1, 3),
            np.arange(num_rows, dtype=np.int32),
            types.SimpleNamespace(
                final_logits_indices=np.zeros(block * dp_size),
                draft_lengths_cpu=lengths.reshape(-1),
                req_indices_dp={
                    shard: list(requests[shard * slots : (shard + 1) * slots])
                    for shard in range(dp_size)
                },
            ),
            vocab_size=10,
            dp_size=dp_size,
            num_reqs=dp_size * slots - 1,
        )
        for function in (tpu_inference.filter_speculative_logprobs, own_filter)
    )
    assert found[3] == expected[3]
    for one, other in zip(found[:3], expected[:3], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


# Its test modules are imported while ours is in place. The devices are for its tests of meshes.
RUN = """
import sys, pytest
from bench.peers import stand_ins
from tpu_inference.spec_decode.jax import utils
from jax_specdec.adapters import tpu_inference
with tpu_inference.install() as names:
    assert len(names) == 6, names
    sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("devices", [1, 4])
def test_their_tests_pass_with_ours_in_place(devices):
    root = metadata.distribution("tpu_inference").locate_file("")
    options = ["-rA", "-p", "no:cacheprovider", "--noconftest", "--import-mode=importlib"]
    options += ["-c", "/dev/null", "--rootdir", str(root)]
    # It counts collectives of theirs and of theirs: ours has fewer.
    options += ["-k", "not test_replication_is_free_for_the_raw_modes"]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    done = ended("-c", RUN, *options, *(root / path for path in TESTS), env=environment)
    print(done.stdout, done.stderr)
    assert done.returncode == 0


def test_prompt_logprobs_with_speculation_in_their_runner():
    """`runner_tpu_inference.py`, with stand-ins of its own."""
    command = ["-q", "-p", "tests.peers.runner_stand_ins", "-p", "no:cacheprovider"]
    command += ["--noconftest", "-c", os.devnull, "tests/peers/runner_tpu_inference.py"]
    done = ended("-m", "pytest", *command)
    print(done.stdout)
    assert done.returncode == 0
    assert "2 passed" in done.stdout


def test_too_many_logprobs_are_refused():
    with jax.set_mesh(MESH), pytest.raises(ValueError, match=r"k = 41 .* 40 tokens"):
        tpu_inference.compute_and_gather_logprobs(jnp.zeros((1, 40)), jnp.zeros(1, int), 41)
