"""Every argument of both doors, wrong in kind, shape, dtype or value: an error to act on.

It names the argument, comes from this package and never from inside of jax, and nothing is computed
with what it refuses.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels import sampling
from pallas_kernels.sampling import CompactQ, DenseQ, Drafts, Sampling
from tests.support import shape_checks
from tests.support.door_calls import NO_CALLS, calls_of
from tests.support.wrong_arguments import complaint, wrong_arrays

V = 40


@pytest.fixture(autouse=True)
def _as_users_run(monkeypatch):
    """Without the suite's own checks of shapes, which would refuse first."""
    monkeypatch.setattr(shape_checks, "refuse_others", lambda *_: None)


@functools.cache
def right():
    """Right arguments of each function, by its name."""
    return calls_of(V)[0]


NUMBERS = ["3", 3.0, True, -1, None]
STATIC = {
    "k": ["3", 3.0, True, -1, V + 1, jnp.int32(3)],
    **dict.fromkeys(("num_positions", "num_slots", "width", "num_drafts"), NUMBERS),
    "vocab_size": ["3", 3.5, -1, 0, True, 10**10],
    "axis_name": [3, "nowhere", ["v"]],
    "mesh": ["m", 3],
    "all_greedy": [1, "yes", None],
    "changed": [1, None, True],
    "rule": ["blocks", None, 3],
    "accept": [3, "u", lambda u, p, q: u],
    "shard": [3, "v"],
    "implementation": ["cuda", 3],
    "rank_ties": ["x", 3],
    "logits_dtype": ["int8", 3],
    "soft_cap": ["x", -1.0],
    "log_sum_exp": [3],
    "entropy": ["x"],
    "top_logits": [None],
    "key": [3, "k", np.zeros(3), np.zeros(2, np.float32)],
}
# What an argument may be all the same.
LEGAL = {
    # Rows that nobody names, columns of a wider head, and values of no array that is looked at.
    ("logits", "one entry more"), ("draft_logits", "one entry more"), ("hidden", "one entry more"),
    ("head", "one entry more"), ("num_rows", "one entry more"), ("token_ids", "one entry more"),
    ("num", "one entry more"), ("drafts.q.values", "one entry more"),
    ("row_digests: row_ids", "one entry more"),  # nothing else has R entries
    # Numbers of any kind, and one number for all.
    *((name, kind) for name in ("temperatures", "temperature", "top_p", "min_p", "top_k", "seed")
      for kind in ("integers", "one axis fewer")),
}  # fmt: skip
UNREAD = ("verified.num_tokens", "verified.cut")  # of what `verify` returned
# The other half of what does not go together may be named.
PARTNERS = {"row_ids": "token_ids", "token_ids": "row_ids", "logits": "allowed", "rows": "cut",
            "hidden": "token_ids"}  # fmt: skip


def wrong_calls(call, arguments):
    """(argument, what is wrong with it, the arguments) of calls with one wrong argument."""
    for name, value in arguments.items():
        if isinstance(value, Drafts | Sampling | CompactQ) or hasattr(value, "_fields"):
            for other in ("text", 3, [1], (1, 2)):
                yield name, repr(other), arguments | {name: other}
            for field, kind, changed in wrong_fields(value):
                yield f"{name}.{field}", kind, arguments | {name: changed}
        elif isinstance(value, list):
            for other in ("text", 3, None, [1], []):
                yield name, repr(other), arguments | {name: other}
        elif hasattr(value, "dtype"):
            for kind, other in wrong_arrays(value):
                yield name, kind, arguments | {name: other}
    for name in inspect.signature(call).parameters:
        for other in STATIC.get(name, ()):
            if name in arguments or name != "num_drafts":
                yield name, repr(other), arguments | {name: other}


def wrong_fields(value):
    for field in value._fields:
        own = getattr(value, field)
        if isinstance(own, DenseQ):
            for kind, other in wrong_arrays(own.values):
                yield "q.values", kind, value._replace(q=DenseQ(other, own.row_ids))
        elif hasattr(own, "_fields"):
            for inner, kind, changed in wrong_fields(own):
                yield f"{field}.{inner}", kind, value._replace(**{field: changed})
        elif hasattr(own, "dtype"):
            for kind, other in wrong_arrays(own):
                yield field, kind, value._replace(**{field: other})


def test_errors_name_the_argument_and_come_from_here():
    complaints = []
    for name, (call, arguments) in right().items():
        for argument, kind, given in wrong_calls(call, arguments):
            here = f"{name}: {argument}", kind  # of this call alone
            if {(argument, kind), here} & LEGAL or argument.startswith(UNREAD):
                continue
            words = f"{argument}.{PARTNERS.get(argument, argument)}"
            problem = complaint(lambda call=call, given=given: call(**given), words)
            if problem:
                complaints.append(f"{name}: {argument} = {kind}: {problem}")
    assert complaints == []


def test_the_table_has_every_function_of_both_doors():
    names = {name.split(",")[0].split(".")[0] for name in right()}
    assert names == {*kernels.__all__, *sampling.__all__} - {*NO_CALLS, "padded_token_ids"}


def test_an_error_of_jax_and_one_without_a_name_are_seen():
    """The control."""
    assert "from inside of" in complaint(lambda: jnp.zeros(3) + jnp.zeros(4), "x")
    assert complaint(lambda: jnp.zeros(3), "x") == "taken"
    assert "does not name it" in complaint(lambda: kernels.greedy("text"), "token_ids")
    assert complaint(lambda: kernels.greedy("text"), "logits") is None


PROBS = np.full((2, 2, V), 1 / V, np.float32)


@pytest.mark.parametrize(("q", "complaints"), [
    (DenseQ(PROBS), ("probabilities sum to", "0.025", "of_probs")),
    (DenseQ.of_probs(np.log(PROBS)), ("sum to", "-3.689")),
    (DenseQ(np.log(PROBS * 1.01)), ("sum to 1.01", "0.001")),
    (DenseQ(jnp.asarray(np.log(PROBS * 1.2), jnp.bfloat16)), ("0.05",)),
    (CompactQ(np.zeros((2, 2, 1), np.int32), PROBS[..., :1]), ("drafts.q.logprobs", "jnp.log")),
    (CompactQ(np.tile(np.arange(V, dtype=np.int32), (2, 2, 1)), PROBS), ("slot 0, draft 0",)),
    (DenseQ(np.log(PROBS[..., :9])), ("columns", "same vocabulary")),
    (DenseQ.of_logits(PROBS, np.nan), ("temperature", "NaN")),
    (DenseQ.of_logits(PROBS, np.ones(3, np.float32)), ("temperature (3,)", "(2,)")),
    (DenseQ(PROBS, form="odds"), ("form", "of_probs")),
    (DenseQ(np.log(PROBS), temperature=1.0), ("temperature", "of_logits")),
    (DenseQ(PROBS, form="logits"), ("temperature", "None")),
    (DenseQ(np.log(PROBS).reshape(4, V)), ("row_ids",)),
    (DenseQ(np.log(PROBS), np.zeros((2, 2), np.int32)), ("flat rows",)),
    (DenseQ(np.log(PROBS).reshape(4, V), np.int32([[0, 1], [2, 4]])),
     ("slot 1, draft 1 is 4", "0 .. 3")),
    (DenseQ.of_logits(PROBS.reshape(4, V), 1.0, np.int32([[-1, 1], [2, 3]])), ("draft 0 is -1",)),
])  # fmt: skip
def test_a_q_that_is_no_distribution_is_refused(q, complaints):
    _, given = right()["verify"]
    drafts = Drafts(given["drafts"].token_ids, jnp.array([2, 2], jnp.int32), q)
    refused(complaints, lambda: sampling.verify(**given | {"drafts": drafts}))


def refused(complaints, call):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    for text in complaints:
        assert text in str(error.value)


def test_a_q_that_nobody_looks_at_may_be_anything():
    """Behind a slot's drafts, of greedy slots, of ids without a token, and within rounding."""
    _, given = right()["verify"]
    log_q = np.log(PROBS) + 5e-4
    log_q[1, 1] = np.nan
    ids = np.int32([[1, V], [2, 3]])
    log_q[0, 1] = 3
    drafts = Drafts(ids, np.int32([2, 1]), DenseQ(log_q))
    sampling.verify(**given | {"drafts": drafts})
    greedy = Sampling.of(2, temperature=np.array([0.8, 0]))
    log_q[1, 0] = 7
    sampling.verify(**given | {"drafts": drafts, "sampling": greedy})


@pytest.mark.parametrize(("options", "complaints"), [
    ({"top_p": 95}, ("top_p has 95 in slot 0", "0 .. 1", "0.95")),
    ({"top_p": np.array([0.5, -1])}, ("top_p has -1 in slot 1",)),
    ({"min_p": 5}, ("min_p has 5",)),
    ({"temperature": np.array([1, np.nan])}, ("temperature has a NaN in slot 1",)),
    ({"seed": jax.random.key(0)}, ("seed is of a JAX key", "key=key")),
    ({"seed": np.asarray(jax.random.PRNGKey(0)).repeat(2)[:3]}, ("seed (3,)", "(2,)")),
    ({"top_k": np.ones(2)}, ("top_k is of float64",)),
    ({"top_k": 2**32 + 3}, ("top_k has 4294967299", "2147483647")),
    ({"temperature": np.ones(3)}, ("temperature (3,)", "[B] = (2,)")),
    ({"seed": 1, "key": jax.random.key(0)}, ("seed and key",)),
    ({"key": jax.random.split(jax.random.key(0), 3)}, ("key (3,)", "2 slots")),
    ({"key": jax.random.PRNGKey(0).astype(jnp.int32)}, ("key is of int32",)),
])  # fmt: skip
def test_parameters_without_a_meaning_are_refused(options, complaints):
    refused(complaints, lambda: Sampling.of(2, **options))


def test_drafts_of_several_kinds_are_not_joined():
    certain = Drafts(np.zeros((2, 1), np.int32), np.ones(2, np.int32), None)
    for other in (Drafts.none(2, 1, 4), Drafts.none(3, 1, 5), certain):
        drawn = [Drafts.none(2, 1, 5), other]
        refused(["several kinds"], lambda drawn=drawn: Drafts.joined(drawn, np.ones(2, np.int32)))


def test_key_data_that_is_no_seed_a_slot_is_refused():
    """uint32 [2] of two slots are seeds."""
    _, given = right()["verify"]
    data = jax.random.PRNGKey(0)
    slots = given["sampling"]
    sampling.verify(**given | {"sampling": slots._replace(seed=data)})
    for keys in (jax.random.split(data, 2), jnp.concatenate([data, data[:1]])):
        with pytest.raises((TypeError, ValueError), match=r"sampling\.seed"):
            sampling.verify(**given | {"sampling": slots._replace(seed=keys)})


def test_what_verify_did_not_leave_is_asked_for_by_name():
    _, given = right()["emitted_logprobs"]
    without_k = given["verified"]._replace(read=None)
    with pytest.raises(ValueError, match=r"verified has no read: give `verify` k"):
        sampling.emitted_logprobs(given["logits"], without_k)
    unchanged = sampling.verify(**right()["verify, drawn"][1], k=2)
    with pytest.raises(ValueError, match=r"changed = True, and `verify` had no changes"):
        sampling.emitted_logprobs(given["logits"], unchanged, changed=True)
    with pytest.raises(ValueError, match=r"not those that were read"):
        sampling.emitted_logprobs(given["logits"][:, :2], unchanged)
