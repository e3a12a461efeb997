"""The decoding loop through the worker's own code, at its edges.

`test_every_value` has whole batches.
"""

from dataclasses import replace

import numpy as np
import pytest

from ipc.wire import SlotState
from jax_specdec.device.drafting.drafters import NoDrafter
from jax_specdec.device.worker import worker as worker_module
from jax_specdec.records.batch import FinishReason
from tests.support import in_mode
from tests.support.decoding import mixed_requests, random_model, request, run
from tests.support.near_ties import NEAR_TIE, margins


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_logprobs_that_take_what_verification_has_read(temperature, monkeypatch):
    """Of a sampled batch, and of a greedy one as on a GPU, whose kept sets are its tokens."""
    monkeypatch.setattr(worker_module, "runs_on_gpu", lambda _: temperature == 0)
    items = [
        replace(item, params=replace(item.params, kept_token_ids=True))
        for item in mixed_requests(3, temperature=temperature)
    ]
    result = run(items, "ngram")
    assert any(output.read is not None for output in result.outputs)
    in_mode.check_records(result, items)


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


def test_a_stop_token_ends_a_request_and_frees_its_slot_on_the_device():
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
        request("r", [1, 2, 3], max_tokens=6, logprobs=2),
        request("kept", [1, 2], max_tokens=3, temperature=1.0, top_p=0.8, kept_token_ids=True),
    ]
    result = run(items, "mtp", model=broken)
    assert [len(result.token_ids(item.id)) for item in items] == [6, 3]
    for record in result.records["r"]:
        assert record.num_tokens == 1  # verification stops at an invalid row
        assert not record.valid.any()
        assert np.isnan(record.logprobs).all()
        assert (record.topk_ids == -1).all()
    assert np.isnan(result.records["r"][-1].cumulative_logprob)
    for record in result.records["kept"]:
        sets = [record.kept.ids(n).tolist() for n in range(record.num_tokens)]
        assert sets == [[token] for token in record.token_ids.tolist()]
