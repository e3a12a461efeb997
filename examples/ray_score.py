"""A batch job: Ray Data reads prompts, engines score them, and Parquet files have the logprobs.

    python examples/ray_score.py --output scored
    python examples/ray_score.py --input prompts.txt --output scored --engines 4

Ray Data starts the engines, feeds each with blocks of prompts, and writes what comes; a block whose
engine is lost is done again elsewhere. Each row has a prompt's token ids, and each token's logprob
given those before it.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import ray

from jax_specdec.engine import Engine, EngineConfig, Request, SamplingParams, Serves, byte_tokens

PROMPTS = ("def main():", "import os", "class A:", "for i in range(10):", "return x", "qqqqqq")
LENGTH = 256  # tokens of a prompt at most
# One token is made and dropped: an engine ends no request without.
PARAMS = SamplingParams(max_tokens=1, prompt_logprobs=0)


class Scorer:
    """An engine of its own in each of Ray Data's actors."""

    def __init__(self):
        config = EngineConfig(
            vocab_size=byte_tokens.VOCAB_SIZE, dtype="float32", max_length=LENGTH + 1,
            drafter="none", on_worker_loss="restart", resume_lost=True, serves=Serves.of([PARAMS]),
        )  # fmt: skip
        self.engine = Engine(config)

    def __call__(self, batch):
        """Score a batch of texts: a dictionary of columns to an Arrow table."""
        prompts = [byte_tokens.encode(text, start_document=True)[:LENGTH] for text in batch["text"]]
        rows = [[] for _ in prompts]
        asked = [
            Request(id=str(n), prompt_token_ids=ids, params=PARAMS) for n, ids in enumerate(prompts)
        ]
        for step in self.engine.generate(asked):
            for record in step.records:
                if record.prompt is not None:
                    rows[int(record.request_id)].append(record.prompt.logprobs[:, 0].copy())
        logprobs = [np.concatenate(parts) for parts in rows]
        return pa.table(
            {
                "text": pa.array(list(batch["text"])),
                "token_ids": pa.array([list(ids) for ids in prompts], pa.list_(pa.int32())),
                "logprobs": pa.array(logprobs, pa.list_(pa.float32())),
                "nats_a_token": np.array([-x.mean() for x in logprobs], np.float32),
            }
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", help="a text file, or a folder of them, a prompt a line")
    parser.add_argument("--output", required=True, help="a folder for Parquet files")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="of each engine")
    parser.add_argument("--gpus", type=float, default=0, help="of each engine")
    options = parser.parse_args(argv)
    if options.input:
        prompts = ray.data.read_text(options.input)
    else:
        prompts = ray.data.from_items([{"text": text} for text in PROMPTS])
    scored = prompts.map_batches(
        Scorer,
        batch_size=64,
        num_cpus=options.cpus,
        num_gpus=options.gpus,
        compute=ray.data.ActorPoolStrategy(size=options.engines),
    )
    scored.write_parquet(options.output)
    ranked = ray.data.read_parquet(options.output).sort("nats_a_token").take_all()
    for row in ranked:
        print(f"{row['nats_a_token']:.2f} nats a token: {row['text']!r}")


if __name__ == "__main__":
    main()
