"""Every argument of the door's functions of messages, wrong in kind, dtype or shape."""

import functools
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec import device
from jax_specdec.requests import SamplingParams
from pallas_kernels.sampling import CompactQ
from tests.support import shape_checks
from tests.support.wrong_arguments import complaint, wrong_arrays

B, S, V = 2, 3, 8


@pytest.fixture(autouse=True)
def _as_users_run(monkeypatch):
    monkeypatch.setattr(shape_checks, "refuse_others", lambda *_: None)


@functools.cache
def right():
    """Right arguments of each function."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(B, S, V)), jnp.float32)
    params = [SamplingParams(logprobs=2, draft_logprobs=True)] * B
    widths = device.widths_of(params, V)
    options = device.options_of_requests(params, widths)
    ids = jnp.zeros((B, S - 1), jnp.int32)
    q = CompactQ(ids[..., None], jnp.zeros((B, S - 1, 1)))
    drafts = device.Drafts(ids, jnp.array([2, 1], jnp.int32), q)
    positions, active = jnp.array([1, 2], jnp.int32), jnp.ones(B, bool)
    verified = device.verify(logits, drafts, options.sampling, positions)
    step = {"drafts": drafts, "verified": verified, "active": active, "running": jnp.bool_(True)}
    output = device.step_output(logits, **step)
    rows = device.select_rows(verified.num_tokens, S)
    row_ids = jnp.arange(B * S, dtype=jnp.int32).reshape(B, S)
    flat = logits.reshape(-1, V)
    flat_verified = device.verify(flat, drafts, options.sampling, positions, row_ids=row_ids)
    of_rows = {"token_ids": verified.token_ids, "rows": rows, "options": options, "widths": widths}
    message = {"output": output, "options": options, "stamp": jnp.zeros(2, jnp.uint32),
               "widths": widths}  # fmt: skip
    words = np.asarray(device.target_message(**message))
    return {
        "widths_of": (device.widths_of, {"params": params, "vocab_size": V}),
        "options_of_requests": (device.options_of_requests, {"params": params, "widths": widths}),
        "select_rows": (
            device.select_rows, {"num_rows": verified.num_tokens, "num_positions": S}
        ),
        "row_logprobs": (device.row_logprobs, {"logits": logits, **of_rows}),
        "row_logprobs, flat": (
            device.row_logprobs, {"logits": flat, **of_rows, "row_ids": row_ids}
        ),
        "draft_rows": (device.draft_rows, {"options": options, "widths": widths}),
        "step_output": (device.step_output, {"logits": logits, **step}),
        "step_output, flat": (
            device.step_output, {"logits": flat, **step, "verified": flat_verified}
        ),
        "target_message": (device.target_message, message),
        "draft_message": (
            device.draft_message,
            {**message, "output": output._replace(drafts=output.drafts._replace(
                report=device.draft_rows(options, widths) and _report()))},
        ),
        "check": (device.check, {"words": words}),
    }  # fmt: skip


def _report():
    from jax_specdec.device.messages.row_logprobs import DraftReport

    columns = jnp.zeros((B, S - 1, 3))
    ids, ranks = columns.astype(jnp.int32), jnp.ones((B, S - 1), jnp.int32)
    return DraftReport(ids, columns, ranks, columns[..., :0])


SIZES = {name: ["3", 3.0, True, -1, None] for name in ("vocab_size", "num_positions")}
# Rows that nobody names, and what decides the size alone.
LEGAL = {("logits", "one entry more", True), ("num_rows", "one entry more", False)}


def test_errors_name_the_argument_and_come_from_here():
    complaints = []
    for name, (call, arguments) in right().items():
        call(**arguments)
        for argument, kind, other in wrong_values(call, arguments):
            legal = (argument, kind, "flat" in name) in LEGAL
            if not legal and (name, kind) != ("check", "one entry more"):
                given = arguments | {argument: other}
                called = functools.partial(call, **given)
                if problem := complaint(called, f"{argument}.token_ids"):
                    complaints.append(f"{name}: {argument} = {kind}: {problem}")
    assert complaints == []


def wrong_values(call, arguments):
    """(argument, what is wrong with it, a value) of each argument in turn."""
    for argument, value in arguments.items():
        if isinstance(value, np.ndarray) or type(value).__module__.startswith("jaxlib"):
            yield from ((argument, kind, other) for kind, other in wrong_arrays(value))
        elif hasattr(value, "_fields") or isinstance(value, list):
            yield from ((argument, repr(x), x) for x in ("text", 3, None, [1], (1, 2)))
    for argument in inspect.signature(call).parameters:
        yield from ((argument, repr(other), other) for other in SIZES.get(argument, ()))
