"""Who is chosen where a program is lowered for a TPU, and what cannot run says why."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import greedy, linear_topk_logprobs, topk_logprobs
from pallas_kernels.backends import read as reads
from pallas_kernels.backends.groups import ListedRows, Needed
from pallas_kernels.backends.mosaic_tpu import schedule as schedules
from pallas_kernels.backends.mosaic_tpu.limits import kernel_is_faster, obstacle
from pallas_kernels.backends.mosaic_tpu.schedule import choose_schedule
from pallas_kernels.lowering.implementation import use_implementation
from pallas_kernels.sampling.rows import GroupedRows
from tests.support import lowered
from tests.support.changed_logits import changes_of
from tests.support.proved_kernels import proved_kernels  # noqa: F401
from tests.support.shards import P, mesh_of

kernels_of = functools.partial(lowered.kernels_of, platform="tpu")


def shapes(rows=8, vocabulary=8192, dtype="bfloat16"):
    return lowered.array((rows, vocabulary), dtype), lowered.array((rows,))


@pytest.mark.parametrize(
    "implementation", [None, pytest.param("mosaic_tpu", marks=pytest.mark.slow)]
)
def test_programs_for_a_tpu_have_the_kernel(implementation):
    def both(x, ids):
        chosen = topk_logprobs(x, ids, 5, row_ids=ids, implementation=implementation)
        largest = greedy(x).token_ids
        return chosen, topk_logprobs(x, largest, 1, implementation=implementation)

    assert kernels_of(both, *shapes()) == 2
    if implementation is None:  # short rows are left to XLA
        assert kernels_of(lambda x, ids: topk_logprobs(x, ids, 0), *shapes(16, 512)) == 0


def call(x, ids, **options):
    return topk_logprobs(x, ids, 5, **options)


by_name = functools.partial(call, implementation="mosaic_tpu")


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_programs_for_other_platforms_have_not(platform):
    assert lowered.KERNELS[1] not in lowered.text_of(call, *shapes(), platform=platform)
    with pytest.raises(NotImplementedError, match="no TPU here; use 'xla' or None"):
        kernels_of(by_name, *shapes(), platform=platform)


def test_what_the_kernel_does_not_serve():
    """None takes XLA for it; by name, an error says why."""
    given = shapes(vocabulary=2**19 + 1)
    assert kernels_of(call, *given) == 0
    with pytest.raises(NotImplementedError, match="do not fit VMEM"):
        kernels_of(by_name, *given)


def on(kind):
    """Lowering for a chip of this kind, which need not be here."""
    device = jax.sharding.AbstractDevice(kind, 1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("one",), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.fast
def test_the_memory_of_a_chip():
    """What a v4's compiler took of its 16 MiB, in MiB; None where no chip is known."""
    assert schedules.vmem_bytes() is None
    with on("TPU v4"):
        assert schedules.vmem_bytes() == 16 << 20
    with on("TPU v5e"):
        assert schedules.vmem_bytes() == 128 << 20
    for rows, k, dtype, masked, taken in (
        (8, 20, "float32", False, 16.66),
        (64, 0, "bfloat16", False, 16.76),
        (64, 20, "float32", False, 17.11),
        (64, 64, "float32", False, 17.23),
        (64, 512, "float32", False, 24.34),
        (64, 512, "bfloat16", False, 25.62),
        (64, 20, "bfloat16", True, 19.92),
    ):
        with on("TPU v4"):
            schedule = choose_schedule((rows, 262_144), rows, k, dtype, False, False, masked)
        assert taken <= schedule.needed_bytes / 2**20 <= schedule.vmem_bytes / 2**20
    # What fits is not refused: 200,064 tokens are the largest common vocabulary below 2**18.
    with on("TPU v4"):
        longest = choose_schedule((64, 200_064), 64, 20, "float32", False, False)
    assert longest.needed_bytes < 16 << 20
    # The cells' maxima have no room there.
    assert not longest.kept
    with on("TPU v5e"):
        assert choose_schedule((64, 200_064), 64, 20, "float32", False, False).kept


def test_the_rule():
    limits = ((0, 32_768), (1, 8192), (4, 8192), (5, 512), (64, 512), (65, 32_768), (512, 131_072))
    for k, least in limits:
        assert kernel_is_faster(64, least, k, "float32")
        assert not kernel_is_faster(64, least - 1, k, "float32")
    # Half of each register would be empty.
    assert not kernel_is_faster(8, 131_072, 0, "bfloat16")
    assert kernel_is_faster(8, 131_072, 0, "float32")
    assert kernel_is_faster(8, 131_072, 1, "bfloat16")


@pytest.mark.fast
def test_masks_biases_and_float16_take_the_kernel():
    changes = changes_of(np.random.default_rng(0), 8, 8192)
    assert kernels_of(functools.partial(call, **changes), *shapes(dtype="float16")) == 1


linear = functools.partial(linear_topk_logprobs, k=5)
HEAD = lowered.array((131_072, 64), "bfloat16")


@pytest.mark.parametrize("rows", [16, 256])
def test_logits_of_hidden_states_that_are_there(rows):
    """All of them, or a part of the columns; XLA's without a K, and by its name."""
    given = lowered.array((rows, 64), "bfloat16"), HEAD, lowered.array((rows,))
    assert kernels_of(linear, *given) == 1
    how = {"mesh": mesh_of(2), "in_specs": (P(), P("model"), P()), "out_specs": P()}
    split = jax.shard_map(lambda *x: linear(*x, axis_name="model").token_ids, **how)
    assert kernels_of(split, *given) == 1
    assert kernels_of(functools.partial(linear, k=0), *given) == 0
    assert kernels_of(functools.partial(linear, implementation="xla"), *given) == 0
    for name in ("xla", "mosaic_gpu"):
        with use_implementation(name):
            assert kernels_of(linear, *given) == 0
    with use_implementation("mosaic_tpu"):
        assert kernels_of(linear, *given) == 1
        with pytest.raises(NotImplementedError, match="no TPU here"):
            kernels_of(linear, *given, platform="cpu")


def test_a_symbolic_number_of_rows():
    (rows,) = jax.export.symbolic_shape("r")
    assert "symbolic" in obstacle(lowered.array((rows, 300), "float32"))
    assert obstacle(shapes()[0]) is None


def test_a_vocabulary_that_is_split_over_devices():
    """Each device reads its own columns with the kernel."""

    def ids_of(x, ids):
        return topk_logprobs(x, ids, 5, axis_name="model").token_ids

    given = P(None, "model"), P()
    split = jax.shard_map(ids_of, mesh=mesh_of(2), in_specs=given, out_specs=P())
    assert kernels_of(split, *shapes()) == 1


@pytest.mark.slow
def test_rows_that_are_sampled_are_read_by_kernels():
    """Their groups; and 64 or 128 candidates, as a branch decides. A batch of `vmap` is XLA's."""

    def array(*shape, dtype="float32"):
        return lowered.array(shape, dtype)

    def read(x, inverse):
        return GroupedRows.of(x).read(inverse, Needed.all_of(jnp.zeros(3, jnp.int32)))

    def candidates(x, rows):
        return reads.candidates(ListedRows(x, rows, jnp.int32(1)), 5, valid=True)

    listed = array(2, dtype="int32")
    assert kernels_of(read, array(3, 4096), array(3)) == 3
    assert kernels_of(candidates, array(3, 4096), listed) == 1
    assert kernels_of(jax.vmap(candidates, (0, None)), array(2, 3, 4096), listed) == 0
    assert kernels_of(jax.vmap(read, (0, None)), array(2, 3, 512), array(3)) == 0


@pytest.mark.fast
def test_who_reads_sampled_rows():
    """By name the kernel reads short rows too."""
    part = jax.eval_shape(lambda x: GroupedRows.of(x).part, shapes(3, 300)[0])
    needed = jax.eval_shape(Needed.all_of, lowered.array((3,)))
    given = part, lowered.array((3,), "float32"), needed

    def read(*given, implementation=None):
        with use_implementation(implementation):
            return reads.read_groups(*given, -1)[0].groups

    assert kernels_of(read, *given) == 0
    assert kernels_of(functools.partial(read, implementation="mosaic_tpu"), *given) == 1
