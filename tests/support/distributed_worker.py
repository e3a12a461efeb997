"""One of the processes that share a model; its arguments are RANK COUNT PORT.

Each runs the same worker on the same commands; process 0 publishes. Prints what it sent and what
became of its slots, as JSON.
"""

import json
import sys

import jax
import numpy as np

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.control import Admit, Evict
from jax_specdec.device.drafting.drafters import NgramDrafter
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.model import sharding
from jax_specdec.device.model.params import init_params
from jax_specdec.device.worker.worker import Worker
from jax_specdec.requests import Request, SamplingParams
from tests.support import quick_compile

CONFIG = ModelConfig.tiny(vocab_size=32)
REQUESTS = (
    SamplingParams(max_tokens=12, logprobs=3),
    SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=5, logprobs=2),
    SamplingParams(max_tokens=40),
)


def run(parallel, *, publish):
    """Messages (lists of words) and slots after decoding REQUESTS, the last of which is evicted."""
    params = quick_compile.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(1))
    sent = []

    class Sender:
        def send(self, data):
            sent.append(np.asarray(data).tolist())

    config = LoopConfig(
        model=CONFIG, drafter=NgramDrafter(2), num_slots=3, max_length=64, parallel=parallel
    )
    worker = Worker(
        config, params, Sender(), prefill_chunk=4, publish=publish, compiled=Compiled(config)
    )
    for slot, request in enumerate(REQUESTS):
        prompt = tuple(range(1, 5 + slot)) * 2
        request = Request(id=str(slot), prompt_token_ids=prompt, params=request)
        worker.apply(Admit(slot=slot, generation=slot + 7, request=request))
    for _ in range(4):
        worker.advance()
    worker.apply(Evict(slot=2, generation=9))
    while worker.busy:
        worker.advance()
    slots = [[slot.generation, slot.occupied, slot.verdict] for slot in worker.slots]
    reused = worker.prefixes.reused
    return {"messages": sent, "slots": slots, "steps": worker.step_number, "reused": reused}


def main():
    rank, count, port = (int(argument) for argument in sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    coordinator = f"127.0.0.1:{port}"
    jax.distributed.initialize(coordinator, count, rank, coordinator_bind_address=coordinator)
    result = run(sharding.tensor_parallel(CONFIG, count), publish=jax.process_index() == 0)
    print(json.dumps(result), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
