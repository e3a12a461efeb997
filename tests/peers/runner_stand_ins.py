"""What tpu-inference's runner imports and a CPU lacks: any name of these modules is a class.

A plugin of pytest in place of `bench.peers.stand_ins`, which has what its functions alone import.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections import namedtuple
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGES = ("vllm", "torch", "torchax", "qwix", "transformers", "pathwaysutils", "ray", "zmq",
            "cloudpickle", "numba", "safetensors", "huggingface_hub", "PIL")  # fmt: skip
RUNNER = ("compilation_manager", "kv_cache_manager", "lora_utils", "multimodal_manager",
          "persistent_batch_manager", "routed_experts", "speculative_decoding_manager",
          "structured_decoding_manager")  # fmt: skip
MODULES = {
    *(f"tpu_inference.runner.{name}" for name in RUNNER),
    *(f"tpu_inference.spec_decode.jax.{name}" for name in ("dflash", "eagle3")),
    "tpu_inference.layers.common.attention_backend",
    "tpu_inference.models.common.model_loader",
}


class Nothing(type):
    """Of classes that take everything, and have a class under every name."""

    def __getattr__(cls, name: str) -> "Nothing":
        """Another."""
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)


def nothing(name: str) -> Nothing:
    """A class that takes everything, and gives the first thing back where it is called."""
    return Nothing(
        name,
        (),
        {
            "__init__": lambda self, *_, **__: None,
            "__call__": lambda self, *given, **_: given[0] if given else self,
            "__class_getitem__": classmethod(lambda cls, _: cls),
        },
    )


class Empty(ModuleType):
    """A module with a class under every name."""

    def __getattr__(self, name: str) -> Nothing:
        """The class, from now on always the same."""
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, nothing(name))
        found: Nothing = vars(self)[name]
        return found


class Finder(MetaPathFinder, Loader):
    """Finds these modules before anything else does."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The module's, if it is one of them."""
        is_one = fullname.partition(".")[0] in PACKAGES or fullname in MODULES
        return ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The empty module."""
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


COLUMNS = "logprob_token_ids", "logprobs", "selected_token_ranks", "cu_num_generated_tokens"
LogprobsTensors = namedtuple("LogprobsTensors", COLUMNS, defaults=[None])  # vLLM's


sys.meta_path.insert(0, Finder())
spec = importlib.util.find_spec("tpu_inference")
assert spec is not None
assert spec.submodule_search_locations is not None
sys.modules["tpu_inference"] = ModuleType("tpu_inference")
sys.modules["tpu_inference"].__path__ = list(spec.submodule_search_locations)
names = "vllm.v1.outputs", "vllm.config.model", "torch"
outputs, model, torch = (importlib.import_module(name) for name in names)
vars(model).update(PROCESSED_LOGPROBS_MODES=("processed_logits", "processed_logprobs"))
vars(outputs).update(LogprobsTensors=LogprobsTensors, ModelRunnerOutput=SimpleNamespace)
vars(torch).update(from_numpy=lambda array: array)
# Options that only a TPU's compiler knows; 0.31 has none.
with contextlib.suppress(ModuleNotFoundError):
    options = importlib.import_module("tpu_inference.models.common.compiler_options")
    vars(options).update(get_sampling_compiler_options=lambda: None)
