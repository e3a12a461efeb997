"""Both doors, their pages and an engine in the modes in which people debug programs of JAX.

    python -m tests.heavy.jax_modes [MODE ...]

In each mode every call of the doors is made outside of `jit` and in it, traced anew, and must give
what it gives without the mode. Then the mode is set by its environment variable, as people do who
cannot change the program: there a worker serves a greedy and a sampled request, and the blocks of
the doors' pages run. They do not where a mode stops at the infinities that they print, nor where
their arrays have 64 bits, which the doors refuse by name, or may not be made from numbers at all.
"""

import os
import sys
import traceback

import jax
import numpy as np

from tests.support.door_calls import door_calls
from tests.support.jax_modes import MODES
from tests.support.processes import ended

PAGES = "docs/api/pallas_kernels.md", "docs/api/sampling.md"
WITHOUT_PAGES = "debug_nans", "debug_infs", "x64", "transfer_guard"
GUARDED = "transfer_guard"  # jax's own `grad` sends a 1, and jit in it what it closes over
INFINITE = "debug_infs"  # what a user's own jit returns is looked at, a cut's infinity too

ENGINE = """
from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, Serves, byte_tokens
prompt = byte_tokens.encode("def main(", start_document=True)
requests = [
    Request(id=str(t), prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=12, logprobs=2, temperature=t))
    for t in (0, 0.8)
]
texts = {}
serves = Serves.of(one.params for one in requests)
with Engine(EngineConfig(vocab_size=byte_tokens.VOCAB_SIZE, serves=serves)) as engine:
    for update in engine.generate(requests):
        for record in update.records:
            texts[record.request_id] = texts.get(record.request_id, "") + byte_tokens.decode(
                record.token_ids
            )
print(sorted(texts.items()))
"""


def failures_of_calls(mode):
    """The calls that raise in a mode, or give something else than without it."""
    calls, failures = door_calls(), []
    context, setting, _ = MODES[mode]
    expected = {name: jax.tree.leaves(call()) for name, call in calls.items()}
    for name, call in calls.items():
        if mode == GUARDED and name.endswith("grad"):
            continue
        for traced in (False, True):
            # Lists of Python integers, and infinities that a jit of the caller's own returns.
            if traced and (name == "padded_token_ids" or mode in (GUARDED, INFINITE)):
                continue
            jax.clear_caches()
            try:
                with context(setting):
                    results = jax.tree.leaves(jax.jit(call)() if traced else call())
                    jax.block_until_ready(results)
                for result, value in zip(results, expected[name], strict=True):
                    assert result.dtype == value.dtype, (result.dtype, value.dtype)
                    np.testing.assert_allclose(result, value, rtol=1e-4, atol=1e-5)
            except Exception:
                failures.append(f"{name}, {'in jit' if traced else 'outside of jit'}")
                traceback.print_exc()
    return failures


def output_of(arguments, variables):
    """What a process prints; its errors where it fails."""
    done = ended(*arguments, env=os.environ | variables)
    return done.stdout if done.returncode == 0 else f"status {done.returncode}: {done.stderr}"


def main():
    expected, failed = output_of(["-c", ENGINE], {}), []
    for mode in sys.argv[1:] or MODES:
        failures = failures_of_calls(mode)
        _, value, name = MODES[mode]
        value = "1" if value is True else value
        text = output_of(["-c", ENGINE], {name: value})
        if text != expected:
            failures.append(f"an engine with {name}={value}: {text[-2000:]}")
        if mode not in WITHOUT_PAGES:
            pages = output_of(
                ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/docs/test_pages.py",
                 "-k", " or ".join(page.rpartition("/")[2] for page in PAGES)],
                {name: value},
            )  # fmt: skip
            if not (" passed" in pages and pages.startswith(".")):
                failures.append(f"pages with {name}={value}: {pages[-2000:]}")
        print(f"{mode}: {'FAILED: ' + '; '.join(failures) if failures else 'ok'}", flush=True)
        failed += failures
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
