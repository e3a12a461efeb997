"""Stand-ins for other libraries' functions that check-device times, in PyTorch or JAX on a CPU.

Their signatures are those of the libraries: `peer_signatures` holds them to the newest wheels. So a
call that a library would refuse is refused here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp


class Library(NamedTuple):
    """Where a library has a function, and what stands in for it."""

    distribution: str
    module: str
    function: str  # with its class, if it is in one
    stand_in: Any
    exported: str = ""  # a module above it that has the name too
    defined: str = ""  # the function whose signature it takes over


def compute_topk_scores(
    logits, num_logprobs, sampled_token_ids, cu_num_logits=None, logprob_token_ids_state=None,
    expanded_idx_mapping=None, max_per_req_token_ids=0, logits_mode=False,
):  # fmt: skip
    import torch

    logprobs = torch.log_softmax(logits.float(), -1)
    best, ids = torch.topk(logprobs, num_logprobs)
    own = logprobs.gather(1, sampled_token_ids[:, None])
    return SimpleNamespace(
        logprob_token_ids=torch.cat([sampled_token_ids[:, None], ids], 1),
        logprobs=torch.cat([own, best], 1),
        selected_token_ranks=(logprobs >= own).sum(1),
    )


class Sampler:
    @staticmethod
    def gather_logprobs(logprobs, num_logprobs, token_ids):
        return compute_topk_scores(logprobs, num_logprobs, token_ids)


def row_logsumexp_topk(x, k):
    import torch

    assert 1 <= k <= 8
    largest = x.float().max(1).values
    best, ids = torch.topk(x.float(), k)
    return largest, torch.logsumexp(x.float() - largest[:, None], 1), best, ids


def top_k(input, k, sorted=False, deterministic=False, tie_break=0, dsa_graph_safe=False):
    import torch

    values, ids = torch.topk(input, k)
    return (values, ids) if sorted else (values.flip(1), ids.flip(1))


def top_k_top_p_sampling_from_logits(
    logits, top_k, top_p, indices=None, filter_apply_order="top_k_first", deterministic=True,
    generator=None, check_nan=False, seed=None, offset=None, top_k_max=None,
):  # fmt: skip
    import torch

    best, ids = torch.topk(logits.float(), top_k)
    probs = torch.softmax(best, -1)
    probs[probs.cumsum(-1) - probs >= top_p] = 0
    chosen = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed))
    return ids.gather(1, chosen)[:, 0].int()


def chunked_lm_head_logprob(
    X, W, labels, *, chunk_size=4096, deterministic=True, backend="cake", compact_rows=None,
    fuse_dw_cast=None, dx_finalize=None, dw_stream=None, hidden_count=None, gemm_tuning=None,
    memory_mode=None, num_valid_rows=None, check_num_valid_rows=False, temperature=None,
    check_temperature=False,
):  # fmt: skip
    import torch

    logprobs = torch.log_softmax((X @ W.T).float(), -1)
    return logprobs.gather(1, labels[:, None])[:, 0]


def tokamax_top_k(scores, k, row_lengths=None, *, return_scores=False, implementation=None):
    best, ids = jax.lax.top_k(scores, k)
    ids = ids[:, ::-1]  # in no order
    bits = jax.lax.bitcast_convert_type(best[:, ::-1], jnp.int32)
    return (ids, bits) if return_scores else ids


LIBRARIES = (
    Library("vllm", "vllm.v1.worker.gpu.sample.logprob", "compute_topk_scores",
            compute_topk_scores),
    Library("vllm", "vllm.v1.sample.sampler", "Sampler.gather_logprobs", Sampler),
    Library("sglang", "sglang.srt.layers.logsumexp", "row_logsumexp_topk", row_logsumexp_topk),
    Library("flashinfer-python", "flashinfer.topk", "top_k", top_k, "flashinfer"),
    Library("flashinfer-python", "flashinfer.sampling", "top_k_top_p_sampling_from_logits",
            top_k_top_p_sampling_from_logits),
    Library("flashinfer-python", "flashinfer.chunked_lm_head", "chunked_lm_head_logprob",
            chunked_lm_head_logprob, defined="chunked_lm_head_det_logprob"),
    Library("tokamax", "tokamax._src.ops.topk.api", "top_k", tokamax_top_k),
)  # fmt: skip


@contextmanager
def in_place(**others: Any) -> Iterator[None]:
    """The libraries' modules, with these functions; `others` by their names in place of them."""
    modules: dict[str, Any] = {}
    for one in LIBRARIES:
        function = others.get(one.function, one.stand_in)
        for place in filter(None, (one.module, one.exported)):
            parts = place.split(".")
            for i in range(len(parts)):
                name = ".".join(parts[: i + 1])
                if name not in modules:
                    modules[name] = ModuleType(name)
                    modules[name].__spec__ = ModuleSpec(name, None)
                    if i:
                        setattr(modules[".".join(parts[:i])], parts[i], modules[name])
            setattr(modules[place], one.function.split(".")[0], function)
    with mock.patch.dict(sys.modules, modules):
        yield
