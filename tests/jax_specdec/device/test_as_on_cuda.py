"""Every device program of the package, traced and lowered as on a host with CUDA devices.

Elsewhere only XLA's implementation is ever traced through the programs around the kernels; here
the choice by platform is, with both. Lowering needs no GPU, and nothing is compiled.
"""

import functools
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig, init_state, state_specs
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages.batch_options import Widths, options_of_requests
from jax_specdec.device.messages.step_messages import draft_message, target_message
from jax_specdec.device.model import sharding
from jax_specdec.device.model.params import init_params
from jax_specdec.requests import SamplingParams
from pallas_kernels import greedy, linear_kept_logprobs, linear_topk_logprobs
from pallas_kernels.backends.mosaic_gpu import limits
from pallas_kernels.meshes import split
from tests.support.proved_kernels import proved_kernels  # noqa: F401
from tests.support.shards import P, mesh_of

VOCAB = 4096  # two shards of the least that the kernels take
SLOTS, DRAFTS, LENGTH, CHUNK = 4, 2, 64, 8
RAW = Widths(k=5)
PROCESSED = Widths(k=20, chosen=16, mode=LogprobsMode.PROCESSED)
# Greedy and sampled, with and without logprobs: which they are is data, and one program has all.
REQUESTS = [
    SamplingParams(max_tokens=9, logprobs=5),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=50, logprobs=3, draft_logprobs=True),
    SamplingParams(max_tokens=9, temperature=1.1, logprobs=2, extra_token_ids=(7,)),
]
shape = jax.ShapeDtypeStruct
NUMBER = shape((), jnp.int32)


@pytest.fixture(autouse=True, scope="module")
def cuda_host():
    """The host has such a GPU. Programs that are kept may have been traced elsewhere."""
    with mock.patch.object(limits, "cuda_capability", return_value=9.0):
        split.program_on_mesh.cache_clear()
        yield
    split.program_on_mesh.cache_clear()


def lowered(function, *args, platform="cuda", **static):
    return function.trace(*args, **static).lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text):
    return text.count("custom_call @mosaic_gpu")


# The programs of the loop ----------------------------------------------------------------------


@functools.cache
class Loop:
    """The programs of one loop, and the shapes and places of what they take."""

    def __init__(self, drafter, shards, prefill_only=False):
        model = ModelConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2,
            head_dim=8, intermediate_size=64, num_mtp_layers=1,
            dtype={1: "float32", 2: "bfloat16"}[shards],
        )  # fmt: skip
        self.parallel = sharding.tensor_parallel(model, shards)
        mtp = MtpDrafter(model, DRAFTS, self.parallel)
        drafters = {"none": NoDrafter(), "mtp": mtp, "ngram": NgramDrafter(DRAFTS)}
        self.config = LoopConfig(
            model, drafters[drafter], num_slots=SLOTS, max_length=LENGTH,
            parallel=self.parallel, prefill_only=prefill_only,
        )  # fmt: skip
        self.compiled = Compiled(self.config)
        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        whole = replace(self.config, parallel=sharding.ONE_DEVICE)
        state = jax.eval_shape(lambda: init_state(whole))
        self.params = self.placed(params, sharding.params_specs(params, shards))
        self.state = self.placed(state, state_specs(state, shards))

    def placed(self, shapes, specs):
        if self.parallel.mesh is None:
            return shapes
        return jax.tree.map(
            lambda x, place: shape(x.shape, x.dtype, sharding=place),
            shapes,
            self.parallel.shardings(specs),
        )

    def program(self, name, widths=None, num_drafts=None, samples=True):
        """A program of the loop, what it gets, and its static arguments."""
        model = self.params, self.state
        if name == "step":
            static = {"report_widths": widths, "num_drafts": num_drafts, "samples": samples}
            return self.compiled.step, (*model, options_of(widths)), static
        if name == "score_chunk":
            named = shape((CHUNK, widths.chosen), jnp.int32)
            scoring = NUMBER, NUMBER, NUMBER, named, options_of(widths, 1)
            return self.compiled.score_chunk, (*model, *scoring), {"chunk": CHUNK, "widths": widths}

        def step_and_message(params, state, options):
            _, output = self.compiled.step(params, state, samples=samples)
            return self.compiled.target_message(output, options, jnp.zeros(2, jnp.uint32),
                                                widths=widths)  # fmt: skip

        return jax.jit(step_and_message), (*model, options_of(widths)), {}


def options_of(widths, count=SLOTS):
    if widths is None:
        return None
    return jax.eval_shape(lambda: options_of_requests(REQUESTS[-count:], widths))


def step_calls(*, tells=False, message=0):
    """The kernels of a step on one device and on two, which has no draw."""
    few, draws = 3, 1  # one read of sampled rows, the draw
    both = few + 2 * tells + message
    return both + draws, both


CASES = [
    # The program and its loop, its static arguments, the kernels that it calls on 1 device and 2.
    ("step: none", {}, *step_calls()),
    ("step: none", {"samples": False}, 0, 0),
    ("step: mtp", {}, *step_calls()),
    ("step: ngram", {}, *step_calls()),
    ("step: ngram", {"num_drafts": 0}, *step_calls()),
    ("step: mtp, prefill only", {}, *step_calls()),
    ("step: mtp", {"widths": PROCESSED}, *step_calls(tells=True)),
    ("score_chunk: mtp", {"widths": RAW}, 0, 0),
    ("score_chunk: mtp", {"widths": PROCESSED}, 5, 5),
    # A message reads the rows that it has, whoever chose their tokens.
    ("step and message: mtp", {"widths": RAW}, *step_calls(message=2)),
    ("step and message: mtp", {"widths": RAW, "samples": False}, 2, 2),
    ("step and message: mtp", {"widths": PROCESSED}, *step_calls(message=2)),
]
# The others are slow ones.
EVERY_RUN = [("step: none", 1), ("score_chunk: mtp", 1)]


def on_devices(case, devices):
    name, options, *calls = case
    quick = (name, devices) in EVERY_RUN and options.get("widths") != PROCESSED
    marks = [pytest.mark.fast] if quick else [pytest.mark.slow]
    marks += [pytest.mark.chips] * (name == "step: none")
    return pytest.param(name, options, calls[devices - 1], devices, marks=marks)


@pytest.mark.parametrize(
    ("name", "options", "expected", "devices"),
    [on_devices(case, devices) for case in CASES for devices in (1, 2)],
)
def test_programs_of_the_loop(name, options, expected, devices):
    """For CUDA with the kernels' calls, where rows are read; for the host's CPU without any."""
    program, _, drafter = name.partition(": ")
    drafter, _, prefill_only = drafter.partition(", ")
    loop = Loop(drafter, devices, bool(prefill_only))
    function, arguments, static = loop.program(program, **options)
    assert custom_calls(lowered(function, *arguments, **static)) == expected
    if expected and devices == 1:
        assert "mosaic_gpu" not in lowered(function, *arguments, platform="cpu", **static)


@pytest.mark.slow
def test_a_step_and_its_messages_with_slots_on_shards():
    """In a `shard_map` over slots: each of two devices has its own part of a batch."""
    loop = Loop("mtp", 1)
    state = jax.eval_shape(lambda: init_state(replace(loop.config, num_slots=2 * SLOTS)))
    specs = jax.tree.map(
        lambda x, part: P(
            *("model" if a != b else None for a, b in zip(x.shape, part.shape, strict=True))
        ),
        state,
        loop.state,
    )

    def one_step(params, state, options):
        state, output = step(loop.config, params, state, options, report_widths=PROCESSED)
        messages = [
            message(output, options, jnp.zeros(2, jnp.uint32), widths=PROCESSED)
            for message in (target_message, draft_message)
        ]
        return state, messages

    options = jax.eval_shape(lambda: options_of_requests(2 * REQUESTS, PROCESSED))
    mapped = jax.shard_map(
        one_step,
        mesh=mesh_of(2),
        in_specs=(P(), specs, P("model")),
        out_specs=(specs._replace(drafts=P("model")), P("model")),
    )
    expected = step_calls(tells=True)[0] + 2
    assert custom_calls(lowered(jax.jit(mapped), loop.params, state, options)) == expected


# Programs of their own -------------------------------------------------------------------------


ROWS, IDS = shape((4, VOCAB), jnp.bfloat16), shape((4,), jnp.int32)


def test_greedy_choices_and_linear_calls_are_left_to_xla():
    def call(hidden, head, ids):
        kept = linear_kept_logprobs(hidden, head, ids, ids[:, None])
        return linear_topk_logprobs(hidden, head, ids, 3), kept

    hidden, head = shape((4, 64), jnp.bfloat16), shape((VOCAB, 64), jnp.bfloat16)
    text = lowered(jax.jit(call), hidden, head, IDS)
    assert custom_calls(text) == custom_calls(lowered(jax.jit(greedy), ROWS)) == 0
    assert "dot_general" in text
