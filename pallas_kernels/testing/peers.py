"""Times of other libraries' ways to logprobs, top K and draws, where they are installed.

Each is a piece of its own: what cannot be imported, fails, hangs or dies is named there, and costs
no other time. Those in PyTorch are captured in a CUDA graph where that works, and timed by events.
Whether their functions still take what is given here is read from the newest wheels by
`tests/rehearsal/peer_signatures.py`; `tests/rehearsal/peer_stand_ins.py` has their signatures.
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

# The calls that are timed beside those of `times.SHAPES`; without `--full` a peer's first two.
_SHAPES = tuple(
    entry for entry in times.SHAPES if entry[0] in (times.TOPK, times.DRAW, times.LINEAR)
)
_FEW = 2
SGLANG_K = 8  # the largest K that SGLang's kernel selects
PeerCall = Callable[..., Any]


class Peer(NamedTuple):
    """A library's way.

    make: imports it; returns a call, of what `backend` computes with, for K. Of `times.TOPK` it
      takes logits [R, V] and ids [R] and returns logprobs [R, K + 1], and ranks [R] or None; of
      `times.DRAW` it returns tokens [R]; of `times.LINEAR` it takes hidden states, ids and a head,
      and returns logprobs [R].
    """

    modules: tuple[str, ...]
    backend: str
    make: Callable[[int], PeerCall]
    job: str = times.TOPK
    most_k: int | None = None
    inclusive: bool = False  # ranks count equal logits

    def applies(self, job: str, shape: Shape) -> bool:
        """Whether it computes such a call at all."""
        if job != self.job or (job == times.TOPK and shape.k == 0):
            return False
        return self.most_k is None or shape.k <= self.most_k


def eager(k: int) -> PeerCall:
    torch = importlib.import_module("torch")
    return _in_torch(lambda logprobs: torch.topk(logprobs, k, dim=-1))


def _compiled(k: int) -> PeerCall:
    torch = importlib.import_module("torch")
    call: PeerCall = torch.compile(eager(k), dynamic=False, fullgraph=True)
    return call


def flashinfer(k: int) -> PeerCall:
    """flashinfer/topk.py, by radix: equal numbers in the order of their ids, as here."""
    top_k = importlib.import_module("flashinfer").top_k
    return _in_torch(
        lambda logprobs: top_k(logprobs, k, sorted=True, deterministic=True, tie_break=1)
    )


def _in_torch(top_k: Callable[[Any], Any]) -> PeerCall:
    torch = importlib.import_module("torch")

    def call(x: Any, ids: Any) -> Any:
        logprobs = torch.log_softmax(x, dim=-1, dtype=torch.float32)
        token_logprobs = logprobs.gather(1, ids[:, None])
        best, _ = top_k(logprobs)
        return torch.cat([token_logprobs, best], 1), (logprobs > token_logprobs).sum(dim=1) + 1

    return call


def vllm(k: int) -> PeerCall:
    """vllm/v1/worker/gpu/sample/logprob.py, of its default model runner."""
    scores = importlib.import_module("vllm.v1.worker.gpu.sample.logprob").compute_topk_scores

    def call(x: Any, ids: Any) -> Any:
        output = scores(x, k, ids)
        return output.logprobs, output.selected_token_ranks

    return call


def vllm_sampler(k: int) -> PeerCall:
    """vllm/v1/sample/sampler.py, of its former model runner; ids are int64."""
    torch = importlib.import_module("torch")
    gather = importlib.import_module("vllm.v1.sample.sampler").Sampler.gather_logprobs

    def call(x: Any, ids: Any) -> Any:
        return gather(torch.log_softmax(x, dim=-1, dtype=torch.float32), k, ids).logprobs, None

    return call


def sglang(k: int) -> PeerCall:
    """sglang/srt/layers/logsumexp.py: one read; it has no ranks."""
    torch = importlib.import_module("torch")
    read = importlib.import_module("sglang.srt.layers.logsumexp").row_logsumexp_topk

    def call(x: Any, ids: Any) -> Any:
        largest, log_sum, best, _ = read(x, k)
        values = torch.cat([x.gather(1, ids[:, None]).float(), best], 1)
        return values - largest[:, None] - log_sum[:, None], None

    return call


def flashinfer_draw(_: int) -> PeerCall:
    """flashinfer/sampling.py."""
    draw = importlib.import_module("flashinfer").sampling.top_k_top_p_sampling_from_logits

    def call(x: Any, _: Any) -> Any:
        return draw(x, times.TOP_K, times.TOP_P, deterministic=True, seed=7, offset=0)

    return call


def flashinfer_head(_: int) -> PeerCall:
    """flashinfer/chunked_lm_head.py, of compute capability 10.0 and newer."""
    head_logprob = importlib.import_module("flashinfer.chunked_lm_head").chunked_lm_head_logprob

    def call(x: Any, ids: Any, head: Any) -> Any:
        return head_logprob(x, head, ids, deterministic=True)

    return call


def tokamax(k: int) -> PeerCall:
    """tokamax/_src/ops/topk/api.py: the only top K that it has, of a TPU's SparseCore; unsorted."""
    top_k = importlib.import_module("tokamax._src.ops.topk.api").top_k

    def call(x: jax.Array, ids: jax.Array) -> Any:
        logprobs = jax.nn.log_softmax(x.astype(jnp.float32))
        token_logprobs = jnp.take_along_axis(logprobs, ids[:, None], axis=1)
        _, bits = top_k(logprobs, k, return_scores=True)
        best = -jnp.sort(-jax.lax.bitcast_convert_type(bits, jnp.float32), axis=1)
        ranks = 1 + jnp.sum(logprobs > token_logprobs, axis=1)
        return jnp.concatenate([token_logprobs, best], axis=1), ranks

    return call


TORCH, FLASHINFER = ("torch",), ("torch", "flashinfer")
ALL = {
    "torch eager": Peer(TORCH, "mosaic_gpu", eager),
    "torch compiled": Peer(TORCH, "mosaic_gpu", _compiled),
    "torch + flashinfer.top_k": Peer(FLASHINFER, "mosaic_gpu", flashinfer),
    "vllm compute_topk_scores": Peer(("torch", "vllm"), "mosaic_gpu", vllm, inclusive=True),
    "vllm Sampler.gather_logprobs": Peer(("torch", "vllm"), "mosaic_gpu", vllm_sampler),
    "sglang row_logsumexp_topk": Peer(("torch", "sglang"), "mosaic_gpu", sglang, most_k=SGLANG_K),
    "flashinfer.sampling": Peer(FLASHINFER, "mosaic_gpu", flashinfer_draw, times.DRAW),
    "flashinfer.chunked_lm_head": Peer(FLASHINFER, "mosaic_gpu", flashinfer_head, times.LINEAR),
    "log_softmax + tokamax top_k": Peer(("tokamax",), "mosaic_tpu", tokamax),
}
REHEARSED_PEERS = {
    times.TOPK: times.REHEARSED[1],
    times.DRAW: Shape(2, 2048, 0, "float32"),
    times.LINEAR: Shape(2, 2048, 0, "float32"),
}


def missing(backend: str) -> dict[str, str | None]:
    """The peers of a backend; of each the first module that is not installed, None if all are."""
    return {
        name: next((m for m in peer.modules if importlib.util.find_spec(m) is None), None)
        for name, peer in ALL.items()
        if peer.backend == backend
    }


def calls_of(name: str, *, full: bool) -> list[tuple[str, Shape]]:
    """The jobs and shapes that a peer is timed at."""
    entries = [entry for entry in _SHAPES if ALL[name].applies(*entry)]
    return entries if full else entries[:_FEW]


def measure_peers(name: str, job: str, shape: Shape, rehearse: bool = False) -> dict[str, Any]:
    """`times.measure` of one peer, whose results are compared first.

    Raises:
      Exception: whatever the library does.
    """
    peer = ALL[name]
    is_linear = job == times.LINEAR
    make = times.hidden_of if is_linear else times.buffers_of
    buffers = make(shape, few=rehearse)
    first = buffers.logits[0][: shape.rows]
    call = peer.make(shape.k)
    if peer.backend == "mosaic_tpu":
        answers, seconds = times.timed(
            lambda x, rows, t: call(times.rows_of(x, rows), t), buffers, rehearse
        )
        _check(peer, answers, first, buffers.ids, shape)
        return times.figures({name: seconds})
    torch = importlib.import_module("torch")
    if not rehearse and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no CUDA device")
    ids, *head = map(torch.from_dlpack, buffers.ids if is_linear else [buffers.ids])
    rows = torch.from_dlpack(buffers.logits[0]).split(shape.rows)
    answers = jax.tree.map(lambda x: x.cpu().numpy(), call(rows[0], ids.long(), *head))
    _check(peer, answers, first, buffers.ids, shape)
    calls = [(x, ids.long(), *head) for x in rows]
    return times.figures({name: _torch_seconds(torch, call, calls, rehearse)})


def _check(peer: Peer, answers: Any, x: jax.Array, ids: Any, shape: Shape) -> None:
    """Raise AssertionError unless a peer's results are right."""
    if peer.job == times.DRAW:
        return _check_drawn(np.asarray(answers), np.asarray(x))
    if peer.job == times.LINEAR:
        by_jax = jax.jit(lambda x, t: plain.topk_logprobs(x @ t[1].T, t[0], 0))(x, ids)
        # Logits are rounded to their own dtype, in another order of additions.
        return np.testing.assert_allclose(answers, by_jax.logprobs[:, 0], rtol=1e-2, atol=5e-2)
    logprobs, ranks = answers
    expected: TopkLogprobs = jax.tree.map(
        np.asarray, jax.jit(lambda x, t: plain.topk_logprobs(x, t, shape.k))(x, ids)
    )
    np.testing.assert_allclose(np.asarray(logprobs), expected.logprobs, rtol=1e-6, atol=3e-5)
    if ranks is not None:
        counted = expected.token_ranks
        if peer.inclusive:
            logits = np.asarray(x).astype(np.float32)
            token_logits = np.take_along_axis(logits, np.asarray(ids)[:, None], axis=1)
            counted = (logits >= token_logits).sum(axis=1)
        np.testing.assert_array_equal(np.asarray(ranks), counted)
    return None


def _check_drawn(tokens: np.ndarray, x: np.ndarray) -> None:
    """Each is among the likeliest tokens, and before it lies less than the mass that is kept."""
    for r, row in enumerate(x.astype(np.float64)):
        best = np.sort(row)[::-1][: times.TOP_K]
        mass = np.exp(best - best[0]) / np.exp(best - best[0]).sum()
        before = mass[best > row[tokens[r]]].sum()
        assert row[tokens[r]] >= best[-1], f"row {r}: token {tokens[r]} is not in the top K"
        assert before < times.TOP_P + 1e-4, f"row {r}: token {tokens[r]} is not in the top p"


def _torch_seconds(torch: Any, call: PeerCall, calls: list[Any], rehearse: bool) -> list[float]:
    """Seconds of a call, one number a round; `calls` are the arguments of each."""
    if rehearse:
        begin = time.perf_counter()
        call(*calls[0])
        return [time.perf_counter() - begin]

    def once() -> None:
        for arguments in calls:
            call(*arguments)

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
    seconds = []
    for _ in range(times.ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            launch()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / (20 * len(calls)))
    return seconds
