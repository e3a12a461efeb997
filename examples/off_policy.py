"""Off-policy correction: rollouts of older weights, scored among the tokens that each kept.

    python examples/off_policy.py

Sequences are drawn with top-p by one set of weights, and learned from under others, as in every
asynchronous trainer. The importance ratio divides the learner's probability of a token, among the
ids that it was drawn among (its kept set), by the one that came with it. Ratios over the whole
vocabulary are of another distribution: their mean, over what the older weights drew, is not 1.
Truncated at 2 (IMPALA, arXiv 1802.01561), they weigh the gradient of tokens that the new weights
would hardly draw. A plot shows how the ratios are spread, for weights that moved further.
"""

from dataclasses import replace

import in_process
import jax
import numpy as np

from ipc.wire import KEPT_ALL
from jax_specdec.device import Compiled, LoopConfig
from jax_specdec.device.drafting import MtpDrafter
from jax_specdec.device.model import load_model, sequence_logprobs
from jax_specdec.engine import LogprobsMode, Request, SamplingParams, byte_tokens
from jax_specdec.export import ColumnBuilder

B, TOKENS, TEMPERATURE, TOP_P, MOST = 16, 24, 1.0, 0.8, 2.0
PROMPT = byte_tokens.encode("def ", start_document=True)
LENGTH = len(PROMPT) + TOKENS
EDGES = np.array([0, 0.5, 0.8, 0.95, 1.05, 1.25, 2, np.inf])


def rollouts(params, model):
    """Draw B sequences with speculation; their columns, one row a token."""
    config = LoopConfig(model, MtpDrafter(model, 1), num_slots=B, max_length=LENGTH)
    requests = [
        Request(
            id=f"{slot:02}", prompt_token_ids=tuple(PROMPT.tolist()),
            params=SamplingParams(
                max_tokens=TOKENS, temperature=TEMPERATURE, top_p=TOP_P, seed=slot, logprobs=0,
                logprobs_mode=LogprobsMode.PROCESSED, kept_token_ids=True,
            ),
        )
        for slot in range(B)
    ]  # fmt: skip
    builder = ColumnBuilder()
    for message in in_process.messages(config, params, requests, Compiled(config)):
        builder.add(message.records)
    return builder.columns()


def learner_of(model):
    """Make a function of weights, ids and kept sets to the logprobs of the emitted tokens."""

    @jax.jit
    def scored(params, ids, kept):
        logprobs = sequence_logprobs(params, model, ids, TEMPERATURE, kept)
        return logprobs[:, len(PROMPT) - 1 :]

    return scored


def moved(params, distance):
    """Move all weights by noise of this size, relative to their own: what training has done."""
    keys = iter(jax.random.split(jax.random.key(5), len(jax.tree.leaves(params))))
    return jax.tree.map(
        lambda w: w + distance * w.std() * jax.random.normal(next(keys), w.shape, w.dtype), params
    )


def show(name, ratios):
    """Print the mean ratio, what of it is truncated, and a plot of how ratios are spread."""
    counts = np.histogram(ratios, EDGES)[0]
    cut = np.minimum(ratios, MOST)
    print(f"{name}: mean ratio {ratios.mean():.3f}, truncated at {MOST:g} {cut.mean():.3f}")
    for low, high, count in zip(EDGES, EDGES[1:], counts, strict=False):
        print(f"  {low:4.2f} to {high:4.2f} {count:4} {'#' * round(60 * count / ratios.size)}")


def main():
    params, model = load_model()
    model = replace(model, row_tile=32)  # rollouts and learner compute the same bits
    columns = rollouts(params, model)
    order = columns.request_id.argsort()
    places = columns.rows_by_place(LENGTH)[order]
    rows = places[:, len(PROMPT) :]
    ids = np.concatenate([np.tile(PROMPT, (B, 1)), columns.token_id[rows]], axis=1)
    kept = columns.kept.padded(places[:, 1:], width=byte_tokens.VOCAB_SIZE)
    whole = kept._replace(
        counts=np.full_like(kept.counts, KEPT_ALL), log_kept=np.zeros_like(kept.log_kept)
    )
    behavior, scored = columns.logprob[rows], learner_of(model)
    for distance in (0.0, 0.03, 0.1):
        new = moved(params, distance)
        own = np.exp(np.asarray(scored(new, ids, kept)) - behavior)
        show(f"weights moved by {distance:g}, among the kept tokens", own)
    wrong = np.exp(np.asarray(scored(params, ids, whole)) - behavior)
    show("weights not moved, over the whole vocabulary (wrong)", wrong)


if __name__ == "__main__":
    main()
