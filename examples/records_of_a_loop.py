"""From logits to records in a loop of your own, in one process and in twenty lines.

    python examples/records_of_a_loop.py

The table stands for any model in plain JAX, Flax NNX or Equinox that gives logits [B, S, V]. Its
drafts are guesses: each step, the last token two more times.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec import device
from jax_specdec.engine import Request, SamplingParams, decode
from jax_specdec.engine import output_processor as processor

TABLE = jax.random.normal(jax.random.key(0), (8, 8)) + 3 * jnp.eye(8)  # [V, V]: after each token


def main() -> None:
    sampled = SamplingParams(max_tokens=6, temperature=1.0, logprobs=0)
    params = [SamplingParams(max_tokens=6, logprobs=2), sampled]
    widths = device.widths_of(params, vocab_size=8)
    asked = device.options_of_requests(params, widths)
    state, tokens = processor.ProcessorState.empty(num_slots=2), [[3], [5]]
    for slot, one in enumerate(params):
        request = Request(id=f"request {slot}", prompt_token_ids=tuple(tokens[slot]), params=one)
        state = processor.admit(state, slot=slot, generation=1, request=request)

    @jax.jit
    def step(logits, drafts, lengths, active, number):
        verified = device.verify(logits, drafts, asked.sampling, lengths)
        output = device.step_output(logits, drafts, verified, active=active, running=active.any())
        return device.target_message(output, asked, number, widths=widths)

    active, number = np.array([True, True]), 0
    while active.any():
        last = np.int32([row[-1:] * 3 for row in tokens])  # the last token and two drafts [B, S]
        drafts = device.Drafts(last[:, 1:], np.full(2, 2, np.int32))
        lengths = np.int32([len(row) for row in tokens])
        words = step(TABLE[last], drafts, lengths, active, np.uint32([number, 0]))
        state, records = processor.step(state, decode(device.check(np.asarray(words))))
        for record in records:
            slot = int(record.request_id[-1])
            print(f"{record.request_id}: {record.token_ids}, {record.num_accepted} drafts accepted")
            print(record.logprobs.round(2))
            tokens[slot] += record.token_ids.tolist()
            active[slot] = record.finish_reason is None
        number += 1


if __name__ == "__main__":
    main()
