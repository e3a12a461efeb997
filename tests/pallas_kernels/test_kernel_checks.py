"""The checks of a device notice a wrong kernel, and name it: each is given kernels that are wrong.

XLA stands in for the kernels. `tests/rehearsal` runs these checks on the kernels' own code, right
and wrong.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.testing import checks, ground, pieces, times
from pallas_kernels.testing.shapes import Shape

BY_XLA = checks.by_name("xla")
SHAPE = Shape(4, 1400, 5, "float32")


def wrong_topk(**fields):
    """`topk` whose results have fields changed by functions of the right ones."""

    def topk(rows, outputs):
        found = BY_XLA.topk(rows, outputs)
        there = {name: getattr(found, name) for name in fields}
        return found._replace(
            **{name: fields[name](x) for name, x in there.items() if x is not None and x.size}
        )

    return replace(BY_XLA, topk=topk)


def told(part, kernels, shape=SHAPE):
    """What the pieces' process says of a check."""
    lines = []
    piece = pieces.Piece(part, lambda: pieces.PARTS[part].check(kernels, shape))
    pieces.run([piece], lines.append)
    assert lines[0] == {"begin": part}
    return lines[1]


@pytest.mark.parametrize(
    "part", ["rows", "greedy", "changes", "edges", "groups", "candidates", "ranks"]
)
def test_right_kernels_pass(part):
    assert told(part, BY_XLA)["ok"]


@pytest.mark.parametrize(
    ("part", "fields", "said"),
    [
        ("rows", {"token_ranks": lambda x: x + 1}, "token_ranks"),  # off by one
        ("rows", {"logprobs": lambda x: x.at[0, 2].add(1e-4)}, "logprobs"),
        ("rows", {"extra_logprobs": lambda x: x.at[0, 0].add(1e-4)}, "extra_logprobs"),
        ("rows", {"entropy": lambda x: x + 1e-4}, "AssertionError"),
        ("rows", {"log_sum_exp": lambda x: x + 1e-4}, "logprobs differ"),
        ("greedy", {"token_ids": lambda x: x.at[:, 0].add(1)}, "token_ids"),
        ("edges", {"token_ids": lambda x: x.at[1, 1:].set(x[1, :0:-1])}, "token_ids"),  # of ties
    ],
)  # fmt: skip
def test_a_wrong_result_is_named(part, fields, said):
    found = told(part, wrong_topk(**fields))
    assert not found["ok"]
    assert said in found["error"]


def test_every_part_has_pieces():
    for backend in ("mosaic_gpu", "mosaic_tpu"):
        kernels = checks.by_name(backend)
        for part in pieces.parts_of(backend):
            few, many = (
                [
                    one.name
                    for one in pieces.pieces_of(part, kernels, backend, full=full, rehearse=False)
                ]
                for full in (False, True)
            )
            assert few == many[: len(few)]
            assert len(set(many)) == len(many)
            small = [*pieces.pieces_of(part, kernels, backend, full=True, rehearse=True)]
            assert len(small) == 1 or part == pieces.PEERS


def test_what_is_no_wrong_answer_ends_the_process():
    """The device's context may be broken, and what follows would be blamed for it."""

    def broken():
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def wrong():
        raise AssertionError("a rank")

    lines = []
    every = {"a": wrong, "b": lambda: None, "c": broken, "d": lambda: None}
    pieces.run([pieces.Piece(*one) for one in every.items()], lines.append)
    ends = [(line["piece"], line["ok"]) for line in lines if "piece" in line]
    assert ends == [("a", False), ("b", True), ("c", False)]
    assert lines[-1]["error"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_platform_that_does_not_start_is_named(monkeypatch):
    def devices(platform):
        if platform == "cuda":
            raise RuntimeError("Backend 'cuda' failed to initialize: driver too old\n\nSee there.")
        raise RuntimeError("Unknown backend tpu")

    monkeypatch.setattr(ground.jax, "devices", devices)
    obstacle = ground.found(full=False)["obstacle"]
    why = "Backend 'cuda' failed to initialize: driver too old See there."
    assert obstacle == f"jax finds no GPU and no TPU here: {why}"


def test_a_timed_program_keeps_its_calls():
    """Nothing is moved out of the loop or left out, though no result is used."""

    def call(x, ids):
        return jax.lax.top_k(jnp.exp(x), 7), jnp.sum(jnp.sin(x), axis=1)

    x, ids = jnp.ones((2, 64)), jnp.zeros(2, jnp.int32)
    program = jax.jit(times.in_one_program(call, 2)).lower(jnp.int32(5), ids, x, x)
    compiled = program.compile().as_text()
    body = compiled[: compiled.index("ENTRY")]
    for operation in ("exponential", "sine"):
        assert body.count(f" {operation}(") >= 2, operation
        assert f" {operation}(" not in compiled[compiled.index("ENTRY") :]


def test_a_contender_with_another_answer_is_not_timed():
    right = BY_XLA.topk(checks.Rows(jnp.ones((2, 9)), jnp.zeros(2, jnp.int32)), checks.Outputs(2))
    right = jax.tree.map(np.asarray, right)
    times.check("ours", right, right)
    for wrong in (
        right._replace(token_ranks=right.token_ranks + 1),
        right._replace(logprobs=right.logprobs + 1e-3),
        right._replace(token_ids=right.token_ids[:, ::-1]),
    ):
        with pytest.raises(AssertionError, match="ours's"):
            times.check("ours", right, wrong)
