"""Compile the verification of sampled drafts for an H100 without one: launches and temporaries.

`python -m bench.aot verify` prints what the program has, in a minute or two.

64 slots of 4 rows, V = 151936, bfloat16, raw logprobs with 20 columns from the same read; the same
of logits that a mask and biases change. The temporaries are those of any batch, whatever its
filters. They may take 5 % of the logits' bytes, beside one block of `BLOCK` rows in float32; of
changed logits, the words of tokens without a bias come on top. Launches are those outside of
branches; a branch counts as one.
"""

import argparse
import time
from typing import Any

import jax

from bench import aot_xla
from pallas_kernels.sampling import Drafts, emitted_logprobs, verify
from pallas_kernels.sampling.parameters import Sampling
from pallas_kernels.testing import compile_target

BATCH, POSITIONS, VOCABULARY, K = 64, 4, 151_936, 20
SHARE, BLOCK = 0.05, 8
# The read of all rows and what it leaves for logprobs are outside of branches; the cut and the draw
# of a batch that samples are in one. Of changed logits there are two sets of sums and candidates,
# and XLA makes the words of tokens without a bias.
LAUNCHES = {"plain": 24, "changed": 33}
# Pass 1; pass 2 for 20, 64, 128 candidates; the draw; ranks.
# Of changed logits, pass 2 for the logits themselves too.
KERNELS = {"plain": 6, "changed": 7}
BIASES = 64


def broken(_: argparse.Namespace) -> int:
    """Print the figures; returns how many limits are broken."""
    size, number_broken = 2 * BATCH * POSITIONS * VOCABULARY, 0
    for kind, number in KERNELS.items():
        begin = time.monotonic()
        compiled = program(changed=kind == "changed")
        text, temporaries = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes
        count = aot_xla.launches(text, 1)
        kernels = text.count('custom_call_target="mosaic_gpu')
        words = size // 16 if kind == "changed" else 0
        most, share = SHARE * size + 4 * BLOCK * VOCABULARY + words, temporaries / size
        took = time.monotonic() - begin
        print(f"{kind}, compiled for an H100 in {took:.0f} s: {kernels} kernels of Mosaic GPU")
        print(f"temporaries: {temporaries} bytes of {most:.0f}, {share:.1%} of the logits")
        print(f"launches outside of branches: {count}; limit {LAUNCHES[kind]}")
        number_broken += (temporaries > most) + (count > LAUNCHES[kind]) + (kernels != number)
    return number_broken


def program(*, changed: bool = False) -> Any:
    """The compiled program of one verification."""
    device = compile_target.find()  # before any array is made

    def of_slots(dtype: str) -> Any:
        return device.array((BATCH,), dtype)

    def call(
        logits: jax.Array, drafts: Drafts, sampling: Sampling, positions: Any, changes: Any
    ) -> Any:
        found = verify(logits, drafts, sampling, positions, k=K, **changes)
        assert found.read is not None
        return found[:2], emitted_logprobs(logits, found)

    floats, integers = of_slots("float32"), of_slots("int32")
    sampling = Sampling(
        temperature=floats, top_k=integers, top_p=floats, min_p=floats, seed=of_slots("uint32")
    )
    logits = device.array((BATCH, POSITIONS, VOCABULARY), "bfloat16")
    drafts = Drafts(device.array((BATCH, POSITIONS - 1), "int32"), integers)
    rows, changes = (BATCH, POSITIONS), {}
    if changed:
        changes = {
            "allowed": device.array((*rows, -(-VOCABULARY // 32)), "int32"),
            "bias_token_ids": device.array((*rows, BIASES), "int32"),
            "bias": device.array((*rows, BIASES), "float32"),
        }
    return device.compile(jax.jit(call).lower(logits, drafts, sampling, integers, changes))
