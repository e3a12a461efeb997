"""Every device program of the package, traced and lowered as on a host with CUDA devices.

Elsewhere only XLA's implementation is ever traced through the programs around the kernels; here
the choice by platform is, with both. Lowering needs no GPU, and nothing is compiled.
"""

import ast
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.loop import state
from jax_specdec.device.loop.state import init_state
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages import step_messages
from jax_specdec.device.messages.row_logprobs import draft_rows
from jax_specdec.device.model import hf_weights
from pallas_kernels import (
    greedy,
    greedy_topk_logprobs,
    linear_kept_logprobs,
    linear_topk_logprobs,
    topk_logprobs,
)
from pallas_kernels.backends.xla import rows as xla
from pallas_kernels.contract.rows import Outputs, Rows
from pallas_kernels.lowering import choose
from pallas_kernels.meshes import split
from pallas_kernels.sampling.drafts import draw, joined
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.sampling.verification import verify
from tests.support import quick_compile
from tests.support.device_programs import (
    CASES,
    DRAFTS,
    PROCESSED,
    RAW,
    SLOTS,
    VOCAB,
    Loop,
    asked,
    loop_of,
    target_message,
)
from tests.support.paths import ROOT
from tests.support.shards import P, mesh_of

KERNELS = 2  # custom calls that one call of a function of `mosaic_gpu` makes
SAMPLED = 3  # that one read of rows makes which may be sampled: pass 2 for few candidates and many
MORE = 2  # beside it: both passes for 1,024 candidates
DRAW = 1  # where no vocabulary is split
ONCE = 1  # pass 2 for K columns, too; where no vocabulary is split, greedy rows have both kernels
RANKS = 1  # those outside of the top K, where no vocabulary is split


@pytest.fixture(autouse=True, scope="module")
def _a_cuda_host():
    """The programs that are kept for one mesh or one shape may have been traced elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "cuda_capability", lambda: 9.0)
        _forget()
        yield
    _forget()


def _forget():
    split.program_on_mesh.cache_clear()


def lowered(function, *args, platform="cuda", **static):
    return function.trace(*args, **static).lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text):
    return text.count("custom_call @mosaic_gpu")


def on_devices(case, devices):
    """The case on so many devices, with its marks."""
    marks = [pytest.mark.fast] if case.fast and devices in case.devices else []
    reads = case.kernels or case.sampled or case.once
    if devices not in case.devices or (not marks and not (reads and devices == 1)):
        marks = [pytest.mark.slow]
    name = f"{case.program}: {case.variant}-{'one device' if devices == 1 else 'two devices'}"
    return pytest.param(case, devices, id=name, marks=marks)


@pytest.mark.parametrize(
    ("case", "devices"), [on_devices(case, devices) for case in CASES for devices in (1, 2)]
)
def test_programs_of_the_loop(case, devices):
    """For CUDA with the kernels' calls, where rows are read; for the host's CPU without any."""
    of = loop_of(case.drafter, devices, case.prefill_only)
    arguments, static = case.arguments(of)
    program = getattr(of.compiled, case.program)
    draws = case.program == "step" and devices == 1
    expected = KERNELS * case.kernels + (SAMPLED + MORE + DRAW * draws) * case.sampled
    if case.once:
        expected += ONCE + KERNELS * (devices == 1) if case.sampled else RANKS * (devices == 1)
    assert custom_calls(lowered(program, *arguments, **static)) == expected
    if expected and devices == 1:
        assert "mosaic_gpu" not in lowered(program, *arguments, platform="cpu", **static)


@pytest.mark.parametrize("experts", [(), (3,)])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_placed(transposed, experts):
    shape = (6, 4) if transposed else (4, 6)
    stack = jax.ShapeDtypeStruct((2, *experts, 4, 6), jnp.bfloat16)
    tensor = jax.ShapeDtypeStruct(shape, jnp.float32)
    place = jax.ShapeDtypeStruct((1 + len(experts),), jnp.int32)
    text = lowered(hf_weights._placing(None), stack, tensor, place, transposed=transposed)
    assert "dynamic_update_slice" in text


def test_empty_slots_are_made():
    of = loop_of("mtp", 1)
    parts = of.state.cache, of.state.drafter, of.state.drafts
    text = lowered(state._empty_slots, *parts, length=of.config.max_length)
    assert custom_calls(text) == 0


ROWS = jax.ShapeDtypeStruct((4, VOCAB), jnp.bfloat16)
IDS = jax.ShapeDtypeStruct((4,), jnp.int32)


def both_functions(split, implementation=None):
    """The public functions on one device, on vocabulary shards, and with rows on shards; jitted."""

    def call(logits, ids, **where):
        where["implementation"] = implementation
        extra, warm = ids[:, None], jnp.full(ids.shape, 0.5, jnp.float32)
        separate = topk_logprobs(
            logits, ids, 3, row_ids=ids, num_rows=2, temperatures=warm, extra_token_ids=extra,
            **where,
        )  # fmt: skip
        return separate, greedy_topk_logprobs(logits, 3, extra_token_ids=extra, **where)

    mesh = mesh_of(2)
    if split == "vocabulary":
        call = functools.partial(call, mesh=mesh, axis_name="model")
    elif split == "rows":
        call = jax.shard_map(call, mesh=mesh, in_specs=P("model"), out_specs=P("model"))
    return jax.jit(call)


@pytest.mark.parametrize(
    "split", [pytest.param("nothing", marks=pytest.mark.fast), "vocabulary", "rows"]
)
def test_xla_where_it_is_asked_for(split):
    assert custom_calls(lowered(both_functions(split), ROWS, IDS)) == 2 * KERNELS
    assert "mosaic_gpu" not in lowered(both_functions(split, "xla"), ROWS, IDS)


def test_the_greedy_choice_is_left_to_xla():
    assert custom_calls(lowered(jax.jit(greedy), ROWS)) == 0


@pytest.mark.parametrize("split", ["nothing", "vocabulary"])
def test_linear_calls_are_left_to_xla(split):
    where = {"mesh": mesh_of(2), "axis_name": "model"} if split == "vocabulary" else {}

    def call(hidden, head, ids):
        kept = linear_kept_logprobs(hidden, head, ids, ids[:, None], **where)
        return linear_topk_logprobs(hidden, head, ids, 3, **where), kept

    hidden = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((VOCAB, 64), jnp.bfloat16)
    text = lowered(jax.jit(call), hidden, head, IDS)
    assert custom_calls(text) == 0
    assert "dot_general" in text


@pytest.mark.slow
def test_programs_of_another_host_have_no_kernels(monkeypatch):
    """The control of every count above: a host with an older GPU takes XLA there."""
    monkeypatch.setattr(choose, "cuda_capability", lambda: 8.0)
    of = Loop("none", 2)
    _forget()
    arguments, static = target_message(of, RAW)
    assert custom_calls(lowered(of.compiled.target_message, *arguments, **static)) == 0
    _forget()


def test_results_vary_as_their_arguments_do(monkeypatch):
    """Under `shard_map` that is a part of their type; the control leaves it out."""
    seen = []

    def trace(call):
        def noted(logits, ids):
            found = call(logits, ids)
            leaves = map(jax.typeof, jax.tree.leaves(found))
            seen.append({one.manual_axis_type.varying for one in leaves})
            return found

        over_rows = {"mesh": mesh_of(2), "in_specs": P("model"), "out_specs": P("model")}
        jax.eval_shape(jax.shard_map(noted, **over_rows), ROWS, IDS)
        return seen.pop()

    def sums(logits, ids):
        return xla.row_sums(Rows(logits, ids), ids.astype(jnp.float32), Outputs(3))

    assert trace(lambda logits, ids: topk_logprobs(logits, ids, 3)) == {frozenset({"model"})}
    assert trace(sums) == {frozenset({"model"})}
    monkeypatch.setattr(choose, "vary_like", lambda values, inputs: values)
    assert frozenset() in trace(sums)


def by_slots(function):
    """`function` in a `shard_map` over slots: each of two devices has its own part of a batch."""
    return quick_compile.jit(
        jax.shard_map(function, mesh=mesh_of(2), in_specs=P("model"), out_specs=P("model"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("widths", [RAW, PROCESSED], ids=lambda widths: widths.mode.name)
def test_messages_with_slots_on_shards(widths):
    """Drafting, verification and both messages of it."""
    target = jax.ShapeDtypeStruct((SLOTS, DRAFTS + 1, VOCAB), jnp.float32)
    draft = jax.ShapeDtypeStruct((SLOTS, DRAFTS, VOCAB), jnp.float32)

    def packed(target, draft, ask, lengths):
        report_drafts = draft_rows(ask, widths)
        drawn = [
            draw(draft[:, d : d + 1], ask.sampling, lengths + d, report_drafts=report_drafts)
            for d in range(DRAFTS)
        ]
        drafts = joined(drawn, lengths)
        found = verify(target, drafts, ask.sampling, lengths)
        output = step_messages.step_output(
            target, drafts, found, active=lengths > 0, running=jnp.any(lengths > 0)
        )
        number = jnp.zeros(2, jnp.uint32)
        return (
            step_messages.target_message(output, ask, number, widths=widths),
            step_messages.draft_message(output, ask, number, widths=widths),
        )

    lengths = jax.ShapeDtypeStruct((SLOTS,), jnp.int32)
    text = lowered(by_slots(packed), target, draft, asked(widths), lengths)
    # Drafts share a function.
    assert custom_calls(text) == 2 * KERNELS + SAMPLED + MORE + DRAW


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter", ["mtp", pytest.param("suffix with corpus", marks=pytest.mark.slow)]
)
def test_steps_with_slots_on_shards(drafter):
    of = loop_of(drafter, 1)
    both = replace(of.config, num_slots=2 * SLOTS)
    state = jax.eval_shape(lambda: init_state(both))
    specs = jax.tree.map(
        lambda x, part: P(
            *("model" if a != b else None for a, b in zip(x.shape, part.shape, strict=True))
        ),
        state,
        of.state,
    )

    def one_step(params, state):
        state, output = step(of.config, params, state, read_k=5)
        return state, output._replace(running=output.running[None])

    mapped = jax.shard_map(
        one_step, mesh=mesh_of(2), in_specs=(P(), specs), out_specs=(specs, P("model"))
    )
    expected = KERNELS + ONCE + SAMPLED + MORE + DRAW
    assert custom_calls(lowered(jax.jit(mapped), of.params, state)) == expected


@pytest.mark.slow
def test_verification_with_slots_on_shards():
    """Greedy, cut and plain slots get what they get on one device, bit for bit."""
    batch, vocab = 8, 64
    rng = np.random.default_rng(1)
    target = jnp.asarray(np.round(rng.normal(0, 2, (batch, 2, vocab)), 1), jnp.float32)
    given = target[:, :1] + jnp.asarray(rng.normal(0, 1, (batch, 1, vocab)), jnp.float32)
    sampling = Sampling(
        temperature=jnp.asarray(np.resize(np.float32([0, 1, 0.4]), batch)),
        top_k=jnp.asarray(np.resize(np.int32([0, 9, 0, 3]), batch)),
        top_p=jnp.asarray(np.resize(np.float32([1, 0.8, 0.9, 1, 1]), batch)),
        min_p=jnp.zeros(batch, jnp.float32),
        seed=jnp.arange(batch, dtype=jnp.uint32),
    )

    def found(target, given, sampling, lengths):
        drafts = joined([draw(given, sampling, lengths)], lengths)
        return verify(target, drafts, sampling, lengths)

    arguments = target, given, sampling, jnp.ones(batch, jnp.int32)
    expected = quick_compile.jit(found)(*arguments)
    assert len(set(expected.num_tokens.tolist())) > 1
    assert jnp.unique(expected.cut.cut_id).size > 2
    jax.tree.map(np.testing.assert_array_equal, by_slots(found)(*arguments), expected)


JIT = {"jit", "pjit", "pmap"}
# Not of `Compiled`, whose programs are those that CASES name, and the tests that lower them.
OTHERS = {
    "jax_specdec/device/loop/state.py: _empty_slots": test_empty_slots_are_made,
    "jax_specdec/device/model/hf_weights.py: _placing": test_weights_are_placed,
    "pallas_kernels/backends/xla/rows.py: traced_once": (
        test_programs_of_another_host_have_no_kernels
    ),
    "pallas_kernels/backends/greedy.py: _of_rows": test_the_greedy_choice_is_left_to_xla,
    "pallas_kernels/lowering/choose.py: lower": test_programs_of_the_loop,
    "pallas_kernels/backends/xla/group_sums.py: sums_of": test_programs_of_the_loop,
    "pallas_kernels/topk/call.py: jitted": test_xla_where_it_is_asked_for,
    "pallas_kernels/linear/call.py: _kept_of": test_linear_calls_are_left_to_xla,
    "pallas_kernels/linear/call.py: _topk_of": test_linear_calls_are_left_to_xla,
    "pallas_kernels/lowering/choose.py: found": test_xla_where_it_is_asked_for,
    "pallas_kernels/backends/xla/groups.py: leaves_of_work": test_programs_of_the_loop,
    "pallas_kernels/meshes/split.py: program_on_mesh": test_xla_where_it_is_asked_for,
}


def jitted(source):
    """The names of the programs that a module jits: variables, attributes or functions."""

    def visit(node, name):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign):
            name = ast.unparse(node.targets[0])
        elif isinstance(node, ast.AnnAssign):
            name = ast.unparse(node.target)
        names = [getattr(node, "attr", None), getattr(node, "id", None)]
        names += [node.name] if isinstance(node, ast.alias) else []
        here = {name} if JIT & set(names) else set()
        return here.union(*(visit(child, name) for child in ast.iter_child_nodes(node)))

    return visit(ast.parse(source), "module")


@pytest.mark.fast
def test_every_program_is_known():
    """A new `jax.jit` needs a case above; those that check a device are no programs of a user's."""
    checks = ROOT / "pallas_kernels" / "testing"
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for package in ("jax_specdec", "pallas_kernels")
        for path in (ROOT / package).rglob("*.py")
        if not path.is_relative_to(checks)
        for name in jitted(path.read_text(encoding="utf-8"))
    }
    of_loop = {f"jax_specdec/device/loop/programs.py: self.{case.program}" for case in CASES}
    assert found == of_loop | set(OTHERS)


@pytest.mark.slow
def test_new_programs_would_be_seen():
    """A `jit` as a decorator, in a variable, in an attribute, and under another name."""
    source = "@partial(jax.jit, donate_argnums=0)\ndef a():\n    b: C = jax.jit(f)\n"
    source += "def d():\n    self.e = jax.jit(g)\n    return jax.pmap(h)\nx = f(1)\n"
    assert jitted(source) == {"a", "b", "self.e", "d"}
    assert jitted("from jax import jit as compiled") == {"module"}
