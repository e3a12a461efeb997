"""Times of other libraries' ways to logprobs and top K, where they are installed.

Each is a piece of its own: what cannot be imported, fails, hangs or dies is named there, and costs
no other time. Those in PyTorch are captured in a CUDA graph where that works, and timed by events.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import TopkLogprobs
from pallas_kernels.testing import plain, times
from pallas_kernels.testing.shapes import Shape

SHAPES = tuple(shape for job, shape in times.SHAPES if job == times.TOPK and shape.k)
Call = (
    times.Call
)  # of logits [R, V] and ids [R] -> logprobs [R, K + 1], and token ranks [R] or None


class Peer(NamedTuple):
    """A library's way: `make` imports it, and returns a call of what `backend` computes with."""

    modules: tuple[str, ...]
    backend: str
    make: Callable[[int], Call]  # of K


def eager(k: int) -> Call:
    torch = importlib.import_module("torch")
    return _in_torch(lambda logprobs: torch.topk(logprobs, k, dim=-1))


def compiled(k: int) -> Call:
    torch = importlib.import_module("torch")
    found: Call = torch.compile(eager(k), dynamic=False, fullgraph=True)
    return found


def flashinfer(k: int) -> Call:
    # https://docs.flashinfer.ai/api/topk.html: values and ids of rows [R, V]
    top_k = importlib.import_module("flashinfer").top_k
    return _in_torch(lambda logprobs: top_k(logprobs, k, sorted=True))


def _in_torch(top_k: Callable[[Any], Any]) -> Call:
    torch = importlib.import_module("torch")

    def call(x: Any, ids: Any) -> Any:
        logprobs = torch.log_softmax(x, dim=-1, dtype=torch.float32)
        own = logprobs.gather(1, ids[:, None])
        best, _ = top_k(logprobs)
        return torch.cat([own, best], 1), (logprobs > own).sum(dim=1) + 1

    return call


def vllm(k: int) -> Call:
    """vllm/v1/sample/sampler.py; its ranks are inclusive, and ids are int64."""
    torch = importlib.import_module("torch")
    gather = importlib.import_module("vllm.v1.sample.sampler").Sampler.gather_logprobs

    def call(x: Any, ids: Any) -> Any:
        return gather(torch.log_softmax(x, dim=-1, dtype=torch.float32), k, ids).logprobs, None

    return call


def tokamax(k: int) -> Call:
    """tokamax/_src/ops/experimental/tpu/topk/api.py: the only top K that it has, of a TPU."""
    top_k = importlib.import_module("tokamax._src.ops.experimental.tpu.topk.api").top_k

    def call(x: jax.Array, ids: jax.Array) -> Any:
        logprobs = jax.nn.log_softmax(x.astype(jnp.float32))
        own = jnp.take_along_axis(logprobs, ids[:, None], axis=1)
        best, _ = top_k(logprobs, k)
        return jnp.concatenate([own, best], axis=1), 1 + jnp.sum(logprobs > own, axis=1)

    return call


ALL = {
    "torch eager": Peer(("torch",), "mosaic_gpu", eager),
    "torch compiled": Peer(("torch",), "mosaic_gpu", compiled),
    "torch + flashinfer.top_k": Peer(("torch", "flashinfer"), "mosaic_gpu", flashinfer),
    "vllm Sampler.gather_logprobs": Peer(("torch", "vllm"), "mosaic_gpu", vllm),
    "log_softmax + tokamax top_k": Peer(("tokamax",), "mosaic_tpu", tokamax),
}


def missing(backend: str) -> dict[str, str | None]:
    """The peers of a backend; of each the first module that is not installed, None if all are."""
    return {
        name: next((one for one in peer.modules if importlib.util.find_spec(one) is None), None)
        for name, peer in ALL.items()
        if peer.backend == backend
    }


def measure(name: str, shape: Shape, rehearse: bool = False) -> dict[str, Any]:
    """`times.measure` of one peer, whose logprobs and ranks are compared first.

    Raises:
      Exception: whatever the library does.
    """
    peer = ALL[name]
    buffers, ids = times.buffers_of(shape, 1 if rehearse else times.MOST_BUFFERS)
    expected = jax.tree.map(
        np.asarray, jax.jit(lambda x, t: plain.topk_logprobs(x, t, shape.k))(buffers[0], ids)
    )
    call = peer.make(shape.k)
    if peer.backend == "mosaic_tpu":
        answers, seconds = times.timed(call, buffers, ids, rehearse)
        _check(answers, expected)
    else:
        seconds = _torch_seconds(call, buffers, ids, expected, rehearse)
    return times.figures({name: seconds})


def _check(found: tuple[Any, Any], expected: TopkLogprobs) -> None:
    logprobs, ranks = found
    np.testing.assert_allclose(np.asarray(logprobs), expected.logprobs, rtol=1e-6, atol=3e-5)
    if ranks is not None:
        np.testing.assert_array_equal(np.asarray(ranks), expected.token_ranks)


def _torch_seconds(
    call: Call, buffers: Any, ids: Any, expected: TopkLogprobs, rehearse: bool
) -> list[float]:
    torch = importlib.import_module("torch")
    if not rehearse and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
    tensors = [torch.from_dlpack(x) for x in buffers]
    own = torch.from_dlpack(ids).long()
    logprobs, ranks = call(tensors[0], own)
    _check((logprobs.cpu(), None if ranks is None else ranks.cpu()), expected)
    if rehearse:
        begin = time.perf_counter()
        call(tensors[0], own)
        return [time.perf_counter() - begin]

    def once() -> None:
        for x in tensors:
            call(x, own)

    for _ in range(3):
        once()
    torch.cuda.synchronize()
    launch: Callable[[], None] = once
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        launch = graph.replay
    except Exception:  # some library synchronizes: its launches count
        torch.cuda.synchronize()
    found = []
    for _ in range(times.ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            launch()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / (20 * len(tensors)))
    return found
