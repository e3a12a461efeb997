"""The worker's programs, compiled for TPUs that need not exist: what they do with the vocabulary.

    python -m bench.tpu.steps CHIP DEVICES VOCABULARY

prints a line of JSON for each program: the loop's step for sampled requests, the message of rows
that were asked for, and a verification whose read serves the raw logprobs of all rows too. It runs
as a process of its own, since libtpu reads its settings when it is loaded.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from bench.tpu.loops import OPERATION, looped
from bench.tpu.programs import ENVIRONMENT, TOPOLOGIES

K = 20
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
DIMENSIONS = re.compile(r"\[([\d,]+)\]")
KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclass(frozen=True)
class Step:
    """What the compiler made of a program of the worker."""

    chip: str
    devices: int
    vocabulary: int
    program: str
    kernels: int  # calls of the kernel
    collectives: dict[str, int]  # by kind and shape
    searched: list[str]  # what is sorted, or searched K times, of the size of a device's columns
    looped: list[str]  # loops of K turns or more over columns of that size
    seconds: float  # of processor time, to compile


def main() -> None:
    """Compile the programs and print what they have."""
    os.environ.update(ENVIRONMENT)
    from pallas_kernels.testing.as_proved import as_proved

    chip, devices, vocabulary = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with as_proved():
        for step in steps(chip, devices, vocabulary):
            print(json.dumps(asdict(step)), flush=True)


def steps(chip: str, devices: int, vocabulary: int) -> Iterator[Step]:
    """Each of the programs, compiled for so many devices of a chip."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from jax_specdec.checkpoint.model_config import ModelConfig
    from jax_specdec.device.drafting.drafters import NgramDrafter
    from jax_specdec.device.loop.programs import Compiled
    from jax_specdec.device.loop.state import LoopConfig, init_state, state_specs
    from jax_specdec.device.messages.batch_options import Widths, options_of_requests
    from jax_specdec.device.model import sharding
    from jax_specdec.device.model.params import init_params
    from jax_specdec.requests import SamplingParams
    from pallas_kernels.sampling import emitted_logprobs, verify

    model = ModelConfig(
        vocab_size=vocabulary, hidden_size=256, num_layers=1, num_heads=8, num_kv_heads=4,
        head_dim=128, intermediate_size=512, dtype="bfloat16",
    )  # fmt: skip
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    parallel = sharding.tensor_parallel(model, devices, topology.devices)
    mesh = parallel.mesh
    assert mesh is not None
    slots = 4
    config = LoopConfig(
        model=model, drafter=NgramDrafter(3), num_slots=slots, max_length=256,
        parallel=parallel,
    )  # fmt: skip

    array: Any = jax.ShapeDtypeStruct

    def at(x: Any, place: Any) -> Any:
        return array(x.shape, x.dtype, sharding=place)

    def placed(shapes: Any, specs: Any) -> Any:
        return jax.tree.map(at, shapes, parallel.shardings(specs))

    params = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    params = placed(params, sharding.params_specs(params, devices))
    state = jax.eval_shape(lambda: init_state(replace(config, parallel=sharding.ONE_DEVICE)))
    state = placed(state, state_specs(state, devices))
    programs: Any = Compiled(config)
    widths = Widths(k=K)
    asked = jax.eval_shape(
        lambda: options_of_requests([SamplingParams(max_tokens=9, logprobs=K)] * slots, widths)
    )

    def one_read(logits: Any, drafts: Any, sampling: Any, positions: Any) -> Any:
        verified = verify(logits, drafts, sampling, positions, k=K, **parallel.columns)
        return verified.token_ids, emitted_logprobs(logits, verified, **parallel.columns)

    def compiled(name: str, traced: Any) -> tuple[Step, Any]:
        begin = time.process_time()
        made = traced.lower(lowering_platforms=("tpu",)).compile()
        seconds = round(time.process_time() - begin, 1)
        text = made.as_text()
        found = Step(
            chip, devices, vocabulary, name, text.count(KERNEL),
            collectives(text), searched(text, vocabulary // devices),
            looped(text, vocabulary // devices, K), seconds,
        )  # fmt: skip
        return found, made

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = programs.step.trace(params, state)
        found, made = compiled("sampled step", traced)
        yield found
        output = jax.tree.map(at, traced.out_info[1], made.output_shardings[1])
        more = (output, asked, array((2,), jnp.uint32), array((), jnp.bool_))
        yield compiled("target message", programs.target_message.trace(*more, widths=widths))[0]
        read = output.logits, state.drafts, state.sampling, state.lengths
        yield compiled("one read", jax.jit(one_read).trace(*read))[0]


class Operation(NamedTuple):
    """A line of a compiled program."""

    name: str
    shape: str  # of the result, or the results
    kind: str
    operands: list[str]
    line: str


def operations(text: str) -> Iterator[Operation]:
    """The operations of a compiled program."""
    for line in text.splitlines():
        found = OPERATION.match(line)
        if found:
            name, shape, kind, operands = found.groups()
            names = re.findall(r"%[\w.\-]+", operands)
            yield Operation(name, re.sub(r"\{[^}]*\}", "", shape), kind, names, line)


def collectives(text: str) -> dict[str, int]:
    """How many collectives a program has, by kind and shape of what they carry."""
    found = Counter(
        f"{one.kind.removesuffix('-start')} {one.shape}"
        for one in operations(text)
        if one.kind.removesuffix("-start") in COLLECTIVES
    )
    return dict(found)


def searched(text: str, columns: int) -> list[str]:
    """What is sorted, or searched K times, and has a dimension of so many columns or more."""
    shapes = {one.name: one.shape for one in operations(text)}
    found = []
    for one in operations(text):
        is_search = one.kind in ("sort", "topk") or 'custom_call_target="TopK"' in one.line
        given = [shapes.get(name, "") for name in one.operands]
        if is_search and max((n for shape in given for n in sizes(shape)), default=0) >= columns:
            found.append(f"{one.kind} {one.name} of {', '.join(given)}")
    return found


def sizes(shape: str) -> list[int]:
    """The dimensions of a shape as XLA writes it, or of several."""
    return [int(n) for dims in DIMENSIONS.findall(shape) for n in dims.split(",")]


if __name__ == "__main__":
    main()
