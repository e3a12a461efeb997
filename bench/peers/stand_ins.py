"""What the peers import and a CPU, or an installation without dependencies, lacks.

It comes before a peer's imports, in tests as a plugin of pytest (`-p bench.peers.stand_ins`), and
stands in for what the one peer of the environment needs.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple


def package(name: str) -> bool:
    """Whether there is a package of this name; it is loaded without its `__init__`, all of it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return False
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [str(Path(spec.origin).parent)]
    return True


def module(name: str, **contents: Any) -> None:
    """A module of these names, in packages that are made where there are none."""
    above, _, own = name.rpartition(".")
    if above and above not in sys.modules:
        module(above)
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
    vars(sys.modules[name]).update(contents)
    if above:
        setattr(sys.modules[above], own, sys.modules[name])


class LogprobsTensors(NamedTuple):
    """vLLM's."""

    logprob_token_ids: Any
    logprobs: Any
    selected_token_ranks: Any
    cu_num_generated_tokens: Any = None


def device_array(mesh: Any, x: Any, sharding: Any = None) -> Any:
    """tpu-inference's, of one process."""
    nowhere = jax.sharding.PartitionSpec(None)
    whole = jax.sharding.NamedSharding(mesh, nowhere)
    return jax.device_put(x, sharding or whole)


if package("tunix"):
    package("tunix.distillation")  # its `__init__` imports the trainer, which wants metrax
if package("tpu_inference"):
    import logging

    import jax

    module("vllm.config.model", PROCESSED_LOGPROBS_MODES=("processed_logits", "processed_logprobs"))
    module("vllm.v1.core.sched.output", SchedulerOutput=object)
    module("vllm.v1.outputs", LogprobsTensors=LogprobsTensors)
    for path in ("layers", "layers.common", "layers.jax", "layers.jax.sample", "runner"):
        package(f"tpu_inference.{path}")
    module("tpu_inference.logger", init_logger=logging.getLogger)
    module("tpu_inference.utils", device_array=device_array)
    # Options that only a TPU's compiler knows.
    options = {"get_sampling_compiler_options": lambda: None}
    module("tpu_inference.models.common.compiler_options", **options)
    module("tpu_inference.runner.input_batch", InputBatch=object)
if importlib.util.find_spec("maxtext"):
    importlib.import_module("maxtext.models.models")
    importlib.import_module("maxtext.utils")
    # What the script of the teacher imports and this lane does not call.
    module("tensorflow")
    module("tunix.sft.checkpoint_manager", CheckpointManager=object)
    module("tunix.sft.peft_trainer", TrainingInput=object)
    module("array_record.python.array_record_module")
    module("maxtext.input_pipeline.input_pipeline_interface")
    for path in ("maxtext.utils.model_creation_utils", "maxtext.utils.maxtext_utils"):
        if path not in sys.modules:
            module(path)
