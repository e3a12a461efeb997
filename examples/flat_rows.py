"""Flat rows, a draft model's whole q and a key a step; records in another process, without jax.

    python examples/flat_rows.py

The tables stand for models: logits after each token. The worker samples its drafts by itself, from
the draft model's logits after the last token.
"""

import subprocess
import sys

import numpy as np

from ipc import RingReader, RingWriter
from jax_specdec.engine import Request, SamplingParams, decode
from jax_specdec.engine import output_processor as processor

B, D, V, ASK = 3, 3, 64, SamplingParams(max_tokens=9, temperature=0.9, top_p=0.95, logprobs=2)
REQUESTS = [Request(id=f"request {n}", prompt_token_ids=(3,), params=ASK) for n in range(B)]


def work(ring_name: str) -> None:
    import jax
    import jax.numpy as jnp

    from jax_specdec import device
    from pallas_kernels.sampling import DenseQ, Drafts, Sampling, row_ids_of, verify

    target, drafter = jax.random.normal(jax.random.key(0), (2, V, V))
    asked = device.options_of_requests([ASK] * B, widths := device.widths_of([ASK], V))

    @jax.jit
    def step(last, at, left, number):
        draft_key, token_key = jax.random.split(jax.random.key(number[0]))
        q = DenseQ.of_logits(drafter[last], 1.0, jnp.tile(jnp.arange(B)[:, None], D))  # [B, V]
        ids = jax.random.categorical(draft_key, drafter[last], shape=(D, B)).T
        drafts = Drafts(ids, jnp.clip(left - 1, 0, D), q)
        rows = row_ids_of(drafts.num + 1, D + 1)  # a request has a row a draft, and one more
        sampling = Sampling.of(B, temperature=0.9, top_p=0.95, key=token_key)
        # [N, V], the last row of them padding.
        logits = target[jnp.zeros(B * (D + 1) + 1, int).at[rows].set(jnp.column_stack([last, ids]))]
        verified = verify(logits, drafts, sampling, at, row_ids=rows, k=2, rule="block")
        sent = device.step_output(logits, drafts, verified, active=left > 0, running=left.any())
        return sent[1:3], device.target_message(sent, asked, number, widths=widths)

    last, at, left, steps = np.int32([3, 5, 8]), np.ones(B, int), np.full(B, 9), 0
    with RingWriter.attach(ring_name) as ring:
        while left.any():
            (ids, num), words = jax.device_get(step(last, at, left, np.uint32([steps, 0])))
            ring.send(device.check(words))
            last, at, left, steps = ids[range(B), num - 1], at + num, left - num, steps + 1


if len(sys.argv) > 1:
    work(sys.argv[1])
else:
    state = processor.ProcessorState.empty(num_slots=B)
    for slot, request in enumerate(REQUESTS):
        state = processor.admit(state, slot=slot, generation=1, request=request)
    with RingReader.create(num_slots=16, slot_bytes=1 << 16) as reader:
        reader.expect_peer(subprocess.Popen([sys.executable, __file__, reader.name]).pid)
        for message in reader:
            state, records = processor.step(state, decode(message.data))
            for record in records:
                print(record.request_id, record.token_ids, record.logprobs[:, 0].round(2))
