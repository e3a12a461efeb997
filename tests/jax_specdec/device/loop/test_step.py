"""One step by itself: with and without jit, and what it exchanges with its drafter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_specdec.device.drafting.drafters import NoDrafter, no_drafts
from jax_specdec.device.loop import programs, prompt_chunks
from jax_specdec.device.loop import step as step_module
from jax_specdec.device.loop.host_slots import admission
from jax_specdec.device.loop.state import LoopConfig, admit, init_state, release
from jax_specdec.device.loop.step import step
from jax_specdec.device.messages import step_messages
from jax_specdec.device.worker.worker import runs_on_gpu
from pallas_kernels import use_implementation
from pallas_kernels.lowering import choose
from pallas_kernels.lowering.choose import resolved
from pallas_kernels.sampling.verification import verify
from tests.support.decoding import random_model, request


@dataclasses.dataclass(frozen=True)
class Watching(NoDrafter):
    """Proposes nothing, and keeps the temperatures that it was shown as its state."""

    def init(self, num_slots, length):
        return super().init(num_slots, length)[0], jnp.zeros(num_slots)

    def prefill(self, params, state, chunk):
        return state

    def propose(self, params, state, context):
        return super().propose(params, state, context)[0], context.sampling.temperature


def test_an_empty_slot_costs_a_greedy_batch_nothing(monkeypatch):
    """Verification and the drafter see only slots that are decoding now."""
    params, model = random_model()
    verified = []

    def spy(logits, drafts, sampling, *args, **options):
        verified.append(sampling.temperature)
        return verify(logits, drafts, sampling, *args, **options)

    monkeypatch.setattr(step_module, "verify", spy)
    config = LoopConfig(model, Watching(1), num_slots=2, max_length=16)
    sampled = request("s", [1], max_tokens=9, temperature=0.7, top_p=0.9)
    state = init_state(config)
    for slot, item in enumerate([request("g", [1], max_tokens=9), sampled]):
        state = admit(state, jnp.int32(slot), admission(item, 16, 1))
    decoding = state._replace(active=jnp.ones(2, bool))

    @jax.jit
    def seen(state):
        state, _ = step(config, params, state)
        return verified.pop(), state.drafter

    # While the request decodes it is sampled; before its first step and after its last, it is not.
    for given, expected in [
        (decoding, 0.7),
        (decoding._replace(active=jnp.array([True, False])), 0.0),
        (release(decoding, jnp.int32(1)), 0.0),
    ]:
        for temperature in seen(given):
            np.testing.assert_allclose(temperature, [0.0, expected])
        assert given.sampling.temperature[1] > 0


@pytest.mark.parametrize("program", ["step", "score_chunk", "target_message"])
def test_the_configured_implementation_computes_the_programs(program, monkeypatch):
    """Each program is traced with `LoopConfig.implementation` in use."""
    _, model = random_model()
    seen = []
    for name in (None, "xla", "mosaic_gpu"):
        config = LoopConfig(model, NoDrafter(1), num_slots=2, max_length=16, implementation=name)

        def spy(*_, **__):
            seen.append(resolved(None))
            raise LookupError

        module = step_messages if program == "target_message" else programs
        module = prompt_chunks if program == "score_chunk" else module
        monkeypatch.setattr(module, program, spy)
        function = getattr(programs.Compiled(config), program)
        with pytest.raises(LookupError):
            function.lower()
    assert seen == [None, "xla", "mosaic_gpu"]


def test_a_worker_without_kernels_reads_as_where_there_are_none(monkeypatch):
    """On a GPU, the greedy choice shares the kernels' read; XLA's does not pay."""
    monkeypatch.setattr(choose, "cuda_capability", lambda: 9.0)
    monkeypatch.setattr(choose, "MIN_VOCABULARY", 1)
    _, model = random_model()
    config = LoopConfig(model, NoDrafter(1), num_slots=2, max_length=16)
    assert runs_on_gpu(config)
    assert not runs_on_gpu(dataclasses.replace(config, implementation="xla"))
    with use_implementation("xla"):
        assert not runs_on_gpu(config)


@dataclasses.dataclass(frozen=True)
class TooWide(NoDrafter):
    def propose(self, params, state, context):
        return no_drafts(context.limit.shape[0], self.num_drafts + 1), state


@pytest.mark.parametrize("prefill_only", [False, True])
def test_proposals_wider_than_a_slot_are_refused_where_they_are_made(prefill_only):
    params, model = random_model()

    def shape(drafter):
        config = LoopConfig(model, drafter, num_slots=2, max_length=16, prefill_only=prefill_only)
        output = jax.eval_shape(lambda state: step(config, params, state)[1], init_state(config))
        return output.token_ids.shape

    assert shape(NoDrafter(2)) == (2, 3)
    with pytest.raises(ValueError, match=r"proposed \(2, 3\) drafts, but .* is \(2, 2\)"):
        shape(TooWide(2))
