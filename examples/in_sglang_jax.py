"""A tiny model's tokens drawn by sglang-jax, with and without `install()`: one loss, less memory.

    pip install --no-deps sglang-jax==0.0.2 && pip install . && python examples/in_sglang_jax.py

Its jitted sampler loses the logprobs that `return_logprob` asks for. Run without jit they are
right, and so they are compared here.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from sgl_jax.srt.layers import sampler as sampling
from sgl_jax.srt.layers.logits_processor import LogitsProcessorOutput
from sgl_jax.srt.layers.sampler import Sampler
from sgl_jax.srt.model_executor.model_runner import ModelRunner
from sgl_jax.srt.sampling.sampling_batch_info import SamplingMetadata

from jax_specdec.adapters import sglang_jax
from pallas_kernels import topk_logprobs

sampling.is_tpu_runtime = lambda: True  # its branch for CPUs cannot be traced
REQUESTS, VOCAB, SIZE, K = 64, 32_000, 64, 5


class Runner(ModelRunner):
    """Theirs, with a model of one embedding and one head."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.sampler, self.model = Sampler(rngs), nnx.Linear(SIZE, VOCAB, rngs=rngs)
        self.embedding = nnx.Embed(VOCAB, SIZE, rngs=rngs)
        self.initialize_jit()

    def logits(self, ids):
        return self.model(self.embedding(ids))


def options():
    """Make the metadata of greedy requests that want the top K."""
    return SamplingMetadata(
        return_logprob=True, top_logprobs_nums=[K] * REQUESTS, token_ids_logprobs=None,
        temperatures=jnp.ones((REQUESTS, 1)), top_ps=jnp.ones(REQUESTS),
        top_ks=jnp.full(REQUESTS, VOCAB), min_ps=jnp.zeros(REQUESTS),
        sampling_seeds=jnp.arange(REQUESTS), is_all_greedy=True, do_penalties=False,
        linear_penalty=None,
    )  # fmt: skip


def memory(function, *arguments):
    """Tell the MB of temporaries and results of a compiled function."""
    memory = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6


def main():
    runner, places = Runner(), jnp.arange(REQUESTS)
    logits = runner.logits(jax.random.randint(jax.random.key(1), (REQUESTS,), 0, VOCAB))
    own, output = LogitsProcessorOutput(logits), LogitsProcessorOutput(logits)
    tokens = jnp.argmax(logits, axis=1)
    logprobs = runner.sampler._greedy_sampling((logits, None, None, None))[1]
    runner.sampler._process_logprob_results((own, options(), tokens, logprobs))
    loss = -own.next_token_logprobs.mean()
    taken = memory(lambda x: runner.sampler._greedy_sampling((x, None, None, None))[1], logits)
    print(f"sglang-jax' own  loss {loss:.4f}, {taken:.1f} MB")
    with sglang_jax.install() as names:
        drawn = runner.sample(output, options(), places)
        loss = -output.next_token_logprobs.mean()
        taken = memory(lambda x: topk_logprobs(x, tokens, K).logprobs, logits)  # its read
        print(f"installed        loss {loss:.4f}, {taken:.1f} MB")
    print(f"{int((drawn == tokens).sum())} of {REQUESTS} tokens are the same")
    print("in the place of", *names)


if __name__ == "__main__":
    main()
