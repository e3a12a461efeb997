"""Every program of the loop, with the shapes and places of what it takes: cases for tests."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipc.wire import LogprobsMode
from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.adaptive import Adaptive
from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.drafters import MtpDrafter, NgramDrafter, NoDrafter
from jax_specdec.device.drafting.from_function import CallableDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig, init_state, state_specs
from jax_specdec.device.messages.batch_options import Widths, options_of_requests
from jax_specdec.device.model import sharding
from jax_specdec.device.model.llama import logits as model_logits
from jax_specdec.device.model.params import init_params
from jax_specdec.requests import Request, SamplingParams
from pallas_kernels.sampling.drafts import draw, joined
from pallas_kernels.sampling.types import Drafts

VOCAB = 4096  # two shards of the least that the kernels take
SLOTS, DRAFTS, LENGTH, CHUNK = 4, 2, 64, 8
DTYPES = {1: "float32", 2: "bfloat16"}  # of the model, by the number of devices


def config_of(shards):
    return ModelConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=64, num_mtp_layers=1, dtype=DTYPES[shards],
    )  # fmt: skip


def the_same_again(params, context):
    last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
    return Drafts(jnp.repeat(last, DRAFTS, axis=1), context.limit)


def drawn_again(model, parallel, params, context):
    rows = model_logits(params, model, context.hidden[:, :1])
    places = [context.lengths + d for d in range(DRAFTS)]
    turns = [
        draw(rows, context.sampling, at, report_drafts=context.report_drafts, **parallel.columns)
        for at in places
    ]
    return joined(turns, context.limit)


def drafter_of(name, model, parallel):
    if name == "callable that draws":
        function = functools.partial(drawn_again, model, parallel)
        return CallableDrafter(function, DRAFTS, VOCAB, drawn=True)
    return {
        "none": lambda: NoDrafter(),
        "mtp": lambda: MtpDrafter(model, DRAFTS, parallel),
        "ngram": lambda: NgramDrafter(DRAFTS),
        "suffix": lambda: SuffixDrafter(DRAFTS),
        "suffix with corpus": lambda: SuffixDrafter(DRAFTS, Corpus.of([np.arange(40) % 7])),
        "callable": lambda: CallableDrafter(the_same_again, DRAFTS, VOCAB),
        "adaptive mtp": lambda: Adaptive(MtpDrafter(model, DRAFTS, parallel)),
        "adaptive ngram": lambda: Adaptive(NgramDrafter(DRAFTS)),
    }[name]()


class Loop:
    """The programs of one loop, and the shapes and places of what they take."""

    def __init__(self, drafter, shards, prefill_only=False):
        model = config_of(shards)
        parallel = sharding.tensor_parallel(model, shards)
        self.parallel = parallel
        self.config = LoopConfig(
            model=model, drafter=drafter_of(drafter, model, parallel), num_slots=SLOTS,
            max_length=LENGTH, parallel=parallel, prefill_only=prefill_only,
        )  # fmt: skip
        self.compiled = Compiled(self.config)
        params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
        state = jax.eval_shape(
            lambda: init_state(replace(self.config, parallel=sharding.ONE_DEVICE))
        )
        self.params = self.placed(params, sharding.params_specs(params, shards))
        self.state = self.placed(state, state_specs(state, shards))

    def placed(self, shapes, specs):
        if self.parallel.mesh is None:
            return shapes
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            shapes,
            self.parallel.shardings(specs),
        )

    def output(self, read_k=None, report_widths=None):
        """What the step returns: logits split by tokens, the rest everywhere."""
        ask = () if report_widths is None else (asked(report_widths),)
        program = self.compiled.step
        found = program.trace(
            self.params, self.state, *ask, read_k=read_k, report_widths=report_widths
        ).out_info[1]
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), found)
        specs = jax.tree.map(
            lambda x: sharding.split(
                x.shape, -1 if x.shape[-1:] == (VOCAB,) else None, self.parallel.num_shards
            ),
            plain,
        )
        return self.placed(plain, specs)


loop_of = functools.cache(Loop)

NUMBER = jax.ShapeDtypeStruct((), jnp.int32)
STEP_NUMBER = jax.ShapeDtypeStruct((2,), jnp.uint32)
RAW = Widths(k=5)
SCALED = Widths(k=5, chosen=16, mode=LogprobsMode.SCALED)
KEPT = Widths(kept=True)
PROCESSED = Widths(k=20, chosen=16, mode=LogprobsMode.PROCESSED)
# Greedy and sampled, with and without logprobs: which they are is data, and one program has all.
REQUESTS = [
    SamplingParams(max_tokens=9, logprobs=5),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0.8, top_k=50, logprobs=3, draft_logprobs=True),
    SamplingParams(max_tokens=9, temperature=1.1, logprobs=2, extra_token_ids=(7,)),
]


def asked(widths, count=SLOTS):
    return jax.eval_shape(lambda: options_of_requests(REQUESTS[-count:], widths))


def admission(of):
    request = Request(id="a", prompt_token_ids=(1, 2, 3), params=REQUESTS[0])
    return jax.eval_shape(
        lambda: host_slots.admission(request, LENGTH, of.config.drafter.num_drafts, (5,))
    )


def score_chunk(of, widths):
    arguments = of.params, of.state, NUMBER, NUMBER, asked(widths, 1)
    return arguments, {"chunk": CHUNK, "widths": widths}


def prompt_message(of, widths):
    arguments, static = score_chunk(of, widths)
    scored = of.compiled.score_chunk.trace(*arguments, **static).out_info[1]
    scored = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), scored)
    generation = jax.ShapeDtypeStruct((SLOTS,), jnp.uint32)
    arguments = scored, NUMBER, arguments[-1], generation, STEP_NUMBER
    return arguments, {"widths": widths, "vocab_size": VOCAB}


def target_message(of, widths, read_k=None):
    arguments = of.output(read_k), asked(widths), STEP_NUMBER, jax.ShapeDtypeStruct((), bool)
    return arguments, {"widths": widths}


def draft_message(of, widths):
    return (of.output(report_widths=widths), asked(widths), STEP_NUMBER), {"widths": widths}


def telling_step(of, widths):
    return (of.params, of.state, asked(widths)), {"report_widths": widths}


def leading(of, count):
    return (jax.ShapeDtypeStruct((500,), jnp.uint32), count), {}


class Case(NamedTuple):
    """A program of `Compiled` with the arguments that one kind of loop or message gives it."""

    program: str
    variant: str
    arguments: Callable[[Loop], tuple[tuple[Any, ...], dict[str, Any]]]
    kernels: int = 0  # calls of the functions that read logits for logprobs
    sampled: int = 0  # reads of rows that may be sampled
    once: bool = False  # of a step whose read serves the logprobs
    drafter: str = "mtp"
    prefill_only: bool = False
    devices: tuple[int, ...] = (1,)  # of every run of the tests; on other numbers it is a slow one
    fast: bool = False


def step_case(drafter, read_k=None, **options):
    return Case(
        "step", f"{drafter}, {'separate' if read_k is None else 'one read'}",
        lambda of: ((of.params, of.state), {"read_k": read_k}),
        sampled=1, once=read_k is not None, drafter=drafter, **options,
    )  # fmt: skip


STEPS = [
    step_case("none", devices=()),
    step_case("none", 5, fast=True),
    step_case("mtp", devices=()),
    step_case("mtp", 5, devices=(1, 2)),
    step_case("ngram", devices=()),
    step_case("ngram", 0, devices=()),
    step_case("suffix", devices=()),
    step_case("suffix with corpus", 5, devices=()),
    step_case("callable", devices=()),
    step_case("callable that draws", 5, devices=()),
    step_case("adaptive mtp", devices=()),
    step_case("adaptive ngram", 5, devices=()),
    step_case("mtp", prefill_only=True, devices=())._replace(variant="mtp, prefill only"),
    *(
        Case(
            "step", f"{drafter}, tells {widths.mode.name}",
            functools.partial(telling_step, widths=widths), kernels=1, sampled=1, drafter=drafter,
            devices=devices,
        )
        for drafter, widths, devices in (
            ("mtp", RAW, ()), ("mtp", SCALED, ()), ("mtp", PROCESSED, (1, 2)),
            ("callable that draws", RAW, ()),
        )
    ),
]  # fmt: skip
PROMPTS = [
    Case("admit", "mtp", lambda of: ((of.state, NUMBER, admission(of)), {}), devices=(1, 2)),
    Case("release", "mtp", lambda of: ((of.state, NUMBER), {}), devices=(1, 2)),
    *(
        Case(
            "prefill_chunk", drafter,
            lambda of: ((of.params, of.state, NUMBER, NUMBER), {"chunk": CHUNK}), drafter=drafter,
            devices=(1, 2) if drafter == "mtp" else (1,),
        )
        for drafter in ("none", "mtp", "adaptive mtp")
    ),
    Case("start_again", "mtp", lambda of: ((of.state,), {}), devices=(1, 2)),
    *(
        Case("copy_prefix", drafter, lambda of: ((of.state, NUMBER, NUMBER), {}), drafter=drafter,
             devices=(1, 2))
        for drafter in ("ngram", "mtp", "adaptive mtp")
    ),
    *(
        Case(
            "score_chunk", widths.mode.name, functools.partial(score_chunk, widths=widths),
            kernels=int(widths is PROCESSED), sampled=int(widths is PROCESSED), devices=devices,
            fast=widths is SCALED,
        )
        for widths, devices in ((RAW, ()), (SCALED, (1,)), (PROCESSED, (1, 2)))
    ),
    *(
        Case("prompt_message", widths.mode.name, functools.partial(prompt_message, widths=widths),
             devices=(1, 2))
        for widths in (RAW, PROCESSED)
    ),
]  # fmt: skip
MESSAGES = [
    Case("target_message", "no logprobs", functools.partial(target_message, widths=Widths()),
         devices=(1, 2)),
    Case(
        "target_message", "of one read",
        functools.partial(target_message, widths=RAW, read_k=5), once=True, devices=(1, 2),
    ),
    Case("target_message", "kept sets", functools.partial(target_message, widths=KEPT),
         devices=(1, 2)),
    Case("leading", "bucket", functools.partial(leading, count=256), devices=(1, 2)),
    Case("draft_message", "no logprobs", functools.partial(draft_message, widths=Widths()),
         devices=(1, 2)),
    *(
        Case(
            "target_message", widths.mode.name,
            functools.partial(target_message, widths=widths), kernels=1, devices=devices,
        )
        for widths, devices in ((RAW, (1,)), (SCALED, ()), (PROCESSED, (1, 2)))
    ),
    *(
        Case("draft_message", widths.mode.name, functools.partial(draft_message, widths=widths),
             devices=devices)
        for widths, devices in ((RAW, (1,)), (PROCESSED, (1, 2)))
    ),
]  # fmt: skip
CASES = [*STEPS, *PROMPTS, *MESSAGES]
