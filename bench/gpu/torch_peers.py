"""The plain way to logprobs in PyTorch, eager and compiled, where PyTorch is installed."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pallas_kernels import TopkLogprobs

# PyTorch is optional and untyped here: imported by name where it is used.
Program = Callable[[Any, Any], tuple[Any, Any, Any]]


def obstacle(on_gpu: bool) -> str | None:
    """Why PyTorch cannot be measured on this machine; None if it can."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    if on_gpu and not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return None


def version() -> str:
    """PyTorch's version and the CUDA version of its build."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "not installed"
    return f"{torch.__version__} (CUDA {torch.version.cuda})"


def programs(k: int) -> dict[str, Program]:
    """Programs by name: logits [R, V], token ids [R] int64 -> ids, logprobs, token ranks."""
    torch = importlib.import_module("torch")

    def topk_logprobs(logits: Any, token_ids: Any) -> tuple[Any, Any, Any]:
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        selected = logprobs.gather(1, token_ids[:, None])
        ranks = (logprobs > selected).sum(dim=1) + 1
        if k == 0:
            return token_ids[:, None], selected, ranks
        top_logprobs, top_ids = torch.topk(logprobs, k, dim=-1)
        ids = torch.cat([token_ids[:, None], top_ids], dim=1)
        return ids, torch.cat([selected, top_logprobs], dim=1), ranks

    torch._dynamo.reset()  # another k is another program, not a recompilation of this one
    return {
        "torch eager": topk_logprobs,
        "torch compiled": torch.compile(topk_logprobs, dynamic=False, fullgraph=True),
    }


def share(array: jax.Array) -> Any:
    """A tensor on the same memory."""
    return importlib.import_module("torch").from_dlpack(jax.block_until_ready(array))  # type: ignore[no-untyped-call]


def plug(num_bytes: int, on_gpu: bool) -> Callable[[], Any]:
    """A function that launches a kernel: it adds 1 to `num_bytes` of float32."""
    torch = importlib.import_module("torch")
    buffer = torch.zeros(num_bytes // 4, device="cuda" if on_gpu else "cpu")
    return lambda: buffer.add_(1)


def wait(_: Any) -> None:
    """Wait for all work that PyTorch has enqueued."""
    torch = importlib.import_module("torch")
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def as_arrays(outputs: tuple[Any, Any, Any]) -> TopkLogprobs:
    """The outputs as `TopkLogprobs` of NumPy arrays."""
    ids, logprobs, ranks = (tensor.cpu().numpy() for tensor in outputs)
    none: Any = np.zeros((len(ids), 0), np.float32)
    return TopkLogprobs(ids.astype(np.int32), logprobs, ranks.astype(np.int32), none)
