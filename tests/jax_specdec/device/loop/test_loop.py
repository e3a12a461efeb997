"""The decoding loop through the worker's own code, at its edges.

`test_every_value` has whole batches.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipc.wire import DeviceCheck, SlotState
from jax_specdec.device.drafting.drafters import NoDrafter, no_drafts
from jax_specdec.device.loop import programs, prompt_chunks
from jax_specdec.device.loop import step as step_module
from jax_specdec.device.loop.host_slots import admission
from jax_specdec.device.loop.state import LoopConfig, init_state, start_slot, stop_slot
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages import step_messages
from jax_specdec.device.worker.outgoing import DeviceCheckError
from jax_specdec.records.batch import FinishReason
from pallas_kernels.lowering.implementation import resolved
from pallas_kernels.sampling.verification import verify
from tests.support import in_mode
from tests.support.decoding import VOCAB, mixed_requests, random_model, request, run
from tests.support.near_ties import NEAR_TIE, margins


def test_kept_sets_of_a_greedy_batch_are_its_tokens():
    items = [
        replace(item, params=replace(item.params, kept_token_ids=True))
        for item in mixed_requests(3)
    ]
    in_mode.check_records(run(items, "ngram"), items)


def test_a_failed_check_raises_and_sends_nothing():
    def distort(output):
        return output._replace(token_ids=output.token_ids.at[0, 0].set(VOCAB))

    with pytest.raises(DeviceCheckError, match=DeviceCheck.TOKEN_ID.name):
        run(mixed_requests(1), "none", distort=distort)


@pytest.mark.slow
def test_greedy_ids_across_batch_shapes_agree_up_to_a_near_tie():
    """[3, 4] steps with drafts against [1, 1] steps without, and other prefill chunks."""
    items = mixed_requests(4, max_tokens=(16, 24))
    wide = run(items, "ngram")
    narrow = run(items, NoDrafter(0), num_slots=1, chunk=16)
    shapes = [{output.logits.shape[:2] for output in one.outputs} for one in (wide, narrow)]
    assert shapes == [{(3, 4)}, {(1, 1)}]
    compared = 0
    for item in items:
        near = np.flatnonzero(np.array(margins(wide, item.id)) < NEAR_TIE)
        end = int(near[0]) if near.size else item.params.max_tokens
        assert wide.token_ids(item.id)[:end] == narrow.token_ids(item.id)[:end]
        compared += end
    assert compared > 40


def test_a_stop_token_frees_its_slot_on_the_device():
    plain = mixed_requests()[5]
    emitted = run([plain], "none").token_ids(plain.id)
    stop = emitted[len(emitted) // 2]
    params = replace(plain.params, logprobs=2, stop_token_ids=(stop,))
    result = run([replace(plain, params=params)], "mtp")
    assert result.token_ids(plain.id) == emitted[: emitted.index(stop) + 1]
    last = result.records[plain.id][-1]
    assert last.finish_reason is FinishReason.STOP_TOKEN
    assert last.logprobs.shape == (last.num_tokens, 3)
    # The device stopped the slot by itself: the steps after it emitted nothing.
    assert {int(m.state[0]) for m in result.messages[last.step + 1 :]} <= {SlotState.STOPPED}


def test_invalid_logits_are_reported_and_stay_in_their_slot():
    """A kept set of such a row has its one token."""
    params, config = random_model()
    # Token 7's logit is NaN in every row.
    broken = replace(params, embedding=params.embedding.at[7].set(np.nan)), config
    items = [
        request("r", [1, 2, 3], max_tokens=6, logprobs=2, entropy=True, log_sum_exp=True),
        request("kept", [1, 2], max_tokens=3, temperature=1.0, top_p=0.8, kept_token_ids=True),
    ]
    result = run(items, "mtp", model=broken)
    assert [len(result.token_ids(item.id)) for item in items] == [6, 3]
    for record in result.records["r"]:
        assert record.num_tokens == 1  # verification stops at an invalid row
        assert not record.valid.any()
        assert np.isnan([*record.logprobs[0], *record.entropy, *record.log_sum_exp]).all()
        assert (record.topk_ids == -1).all()
    assert np.isnan(result.records["r"][-1].cumulative_logprob)
    for record in result.records["kept"]:
        sets = [record.kept.ids(n).tolist() for n in range(record.num_tokens)]
        assert sets == [[token] for token in record.token_ids.tolist()]


# One step by itself: what it exchanges with its drafter, and what computes it --------------------


def test_an_empty_slot_costs_a_greedy_batch_nothing(monkeypatch):
    """Verification and the drafter see only slots that are decoding now."""
    params, model = random_model()
    shown = []

    def spy(logits, drafts, sampling, *args, **options):
        shown.append(sampling.temperature)
        return verify(logits, drafts, sampling, *args, **options)

    class Watching(NoDrafter):
        def propose(self, params, state, context):
            shown.append(context.sampling.temperature)
            return super().propose(params, state, context)

    monkeypatch.setattr(step_module, "verify", spy)
    config = LoopConfig(model, Watching(1), num_slots=2, max_length=16)
    sampled = request("s", [1], max_tokens=9, temperature=0.7, top_p=0.9)
    state = init_state(config)
    for slot, item in enumerate([request("g", [1], max_tokens=9), sampled]):
        state = start_slot(state, jnp.int32(slot), admission(item, 16, 1))
    decoding = state._replace(active=jnp.ones(2, bool))

    @jax.jit
    def seen(state):
        step(config, params, state)
        return shown.pop(), shown.pop()

    # While the request decodes it is sampled; before its first step and after its last, it is not.
    for given, expected in [
        (decoding, 0.7),
        (decoding._replace(active=jnp.array([True, False])), 0.0),
        (stop_slot(decoding, jnp.int32(1)), 0.0),
    ]:
        for temperature in seen(given):
            np.testing.assert_allclose(temperature, [0.0, expected])
        assert given.sampling.temperature[1] > 0


@pytest.mark.parametrize(
    ("module", "program"),
    [(programs, "step"), (prompt_chunks, "score_chunk"), (step_messages, "target_message")],
)
def test_the_configured_implementation_computes_the_programs(module, program, monkeypatch):
    """Each program is traced with `LoopConfig.implementation` in use."""
    _, model = random_model()
    seen = []
    for name in (None, "xla", "mosaic_gpu"):
        config = LoopConfig(model, NoDrafter(1), num_slots=2, max_length=16, implementation=name)

        def spy(*_, **__):
            seen.append(resolved(None))
            raise LookupError

        monkeypatch.setattr(module, program, spy)
        function = getattr(programs.Compiled(config), program)
        with pytest.raises(LookupError):
            function.lower()
    assert seen == [None, "xla", "mosaic_gpu"]


class TooWide(NoDrafter):
    def propose(self, params, state, context):
        return no_drafts(context.limit.shape[0], self.num_drafts + 1), state


@pytest.mark.parametrize("prefill_only", [False, True])
def test_proposals_wider_than_a_slot_are_refused(prefill_only):
    params, model = random_model()

    def shape(drafter):
        config = LoopConfig(model, drafter, num_slots=2, max_length=16, prefill_only=prefill_only)
        output = jax.eval_shape(lambda state: step(config, params, state)[1], init_state(config))
        return output.token_ids.shape

    assert shape(NoDrafter(2)) == (2, 3)
    with pytest.raises(ValueError, match=r"proposed \(2, 3\) drafts, but .* is \(2, 2\)"):
        shape(TooWide(2))
