"""The fused kernel of `linear_topk_logprobs` on a GPU, beside XLA's blocks and the product alone.

One launch is one sample, as in `kernels`. Before, the results are compared; and whether the logit
of each row's token has the bits that it has in its group is shown: else every call counts twice.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import linear, linear_model
from bench.gpu import contenders, kernels, summary
from bench.gpu.contenders import Contender, Machine
from bench.linear import Shape
from bench.report.comparison import Comparison, Target, from_samples
from pallas_kernels.linear import forward, on_gpu
from pallas_kernels.linear.definition import Definition
from pallas_kernels.linear.read_columns import Rows
from pallas_kernels.linear.types import Call, Inputs
from pallas_kernels.lowering import obstacles
from pallas_kernels.meshes.vocab_shard import WHOLE

XLA, FUSED, PRODUCT = "xla, blocks", "mosaic_gpu, fused", linear.BARE
SHAPES = tuple(
    Shape(rows, hidden, 151_936, 0, "bfloat16")
    for hidden in (1024, 2048, 4096)
    for rows in (256, 1024, 8192)
)
REHEARSED = tuple(Shape(9, 64, vocabulary, 0, "bfloat16") for vocabulary in (256, 304))


def shapes(on_gpu_here: bool) -> tuple[Shape, ...]:
    """What is measured here; none, and why, on a GPU that has no wgmma."""
    capability = obstacles.cuda_capability()
    reason = None if capability is None else on_gpu.device_obstacle(capability)
    if reason is not None:
        print(f"NOT RUN: the fused kernel of linear_topk_logprobs: {reason}")
        return ()
    return SHAPES if on_gpu_here else REHEARSED


def measure(shape: Shape, machine: Machine) -> Comparison:
    """Compare the ways' results, then measure them."""
    hidden, head, ids = linear.arrays_of(shape)
    programs = {
        XLA: calling(shape, "xla", None),
        FUSED: calling(shape, "mosaic_gpu", machine.interpret),
        PRODUCT: lambda hidden, head, _: linear.logits_of(hidden, head, shape.dtype),
    }
    plug = contenders.jax_plug(machine.plug_bytes)
    ways = {
        name: contender(program, (hidden, head, ids), plug) for name, program in programs.items()
    }
    product, expected, found = (
        ways[name].result(ways[name].launch(0)) for name in (PRODUCT, XLA, FUSED)
    )
    linear.check(FUSED, product, expected, found)
    spans = kernels.interleave(ways, machine)
    comparison = from_samples(
        f"linear_topk_logprobs N={shape.rows} H={shape.hidden} V={shape.vocabulary} {shape.dtype}",
        {name: [span.total for span in spans[name]] for name in ways},
        settings={
            "linear shape": str(shape),
            "device": jax.devices()[0].device_kind,
            "clock": kernels.clock_name(machine),
            "tokens' logits with other bits": other_bits(shape, machine, hidden, head, ids),
        },
    )
    flops = 2 * shape.rows * shape.hidden * shape.vocabulary
    figures = {name: {"Tflop/s": flops / comparison[name].median / 1e12} for name in ways}
    value = comparison.speedup(FUSED, XLA) if machine.on_gpu else None
    target = Target(f"speed over {XLA}", linear_model.WORTH, value, "x", True)
    return replace(comparison, suite=summary.LINEAR, figures=figures, targets=(target,))


def calling(shape: Shape, implementation: str, interpret: Any) -> Any:
    """A program of hidden, head and ids."""
    call = Call(Definition(logits_dtype=shape.dtype), 0, False, WHOLE, None, implementation)

    def program(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> Any:
        extra = jnp.zeros((shape.rows, 0), jnp.int32)
        inputs = Inputs(hidden, head, None, ids, None, None, None, extra)
        return forward.topk_logprobs(call, inputs, interpret)

    return program


def contender(program: Any, arrays: tuple[jax.Array, ...], plug: Any) -> Contender:
    """A program that is compiled ahead of time, on the same arrays in every round."""
    compiled = jax.jit(program).lower(*arrays).compile()
    memory: Any = compiled.memory_analysis()
    return Contender(
        launch=lambda _: compiled(*arrays),
        plug=plug,
        wait=jax.block_until_ready,
        result=lambda out: jax.tree.map(np.asarray, out),
        temporaries=None if memory is None else memory.temp_size_in_bytes,
    )


def other_bits(
    shape: Shape, machine: Machine, hidden: jax.Array, head: jax.Array, ids: jax.Array
) -> int:
    """How many rows' tokens have another logit beforehand than in their group."""
    definition = Definition(logits_dtype=shape.dtype)

    def both(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> jax.Array:
        guess = on_gpu.given_logits(definition, hidden, head, None, ids, machine.interpret)
        rows = Rows(ids[:, None], guess, None)
        arrays = (definition, False, hidden, head, None, jnp.int32(shape.vocabulary), rows)
        _, own = on_gpu.read(*arrays, machine.interpret)
        return jnp.sum(own[:, 0] != guess)

    return int(jax.jit(both)(hidden, head, ids))
