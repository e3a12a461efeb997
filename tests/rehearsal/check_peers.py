"""How check-device calls other libraries: PyTorch itself, and stand-ins of others' signatures.

python -m pytest tests/rehearsal/check_peers.py     # needs PyTorch, and a C++ compiler for its own
"""

import pytest
import torch  # noqa: F401  # before `sys.modules` is patched, which would forget it

from pallas_kernels.testing import checks, peers, pieces, times
from tests.rehearsal import peer_stand_ins

# PyTorch's compiler imports functions of its own that it would have nobody use.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
OF_OTHERS = [name for name in peers.ALL if name not in ("torch eager", "torch compiled")]
STANDING_IN = {
    "torch + flashinfer.top_k": "top_k",
    "vllm compute_topk_scores": "compute_topk_scores",
    "vllm Sampler.gather_logprobs": "Sampler.gather_logprobs",
    "sglang row_logsumexp_topk": "row_logsumexp_topk",
    "flashinfer.sampling": "top_k_top_p_sampling_from_logits",
    "flashinfer.chunked_lm_head": "chunked_lm_head_logprob",
    "log_softmax + tokamax top_k": "top_k",
}


def told(name):
    """What the pieces' process says of a peer in a rehearsal."""
    backend = peers.ALL[name].backend
    every = pieces.pieces_of(
        pieces.PEERS, checks.by_name("xla"), backend, full=False, rehearse=True
    )
    (piece,) = [one for one in every if one.name.startswith(f"{pieces.PEERS}: {name}: ")]
    lines = []
    pieces.check_pieces([piece], lines.append)
    return lines[-1]


@pytest.mark.parametrize("name", peers.ALL)
def test_a_peer_is_called_as_it_wants_and_timed(name):
    with peer_stand_ins.in_place():
        assert peers.missing(peers.ALL[name].backend)[name] is None
        found = told(name)
    assert found["ok"], found
    assert found["figures"]["us"][name] > 0


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_peer_with_another_signature_or_result_is_named(name):
    def moved(first, /):
        raise AssertionError("it takes more")

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        if isinstance(found, tuple):
            return tuple(x if x.ndim < 2 else x * 0 for x in found)
        if hasattr(found, "logprobs"):
            found.logprobs = found.logprobs + 1
            return found
        return found + 1

    function = STANDING_IN[name]
    for one in peer_stand_ins.LIBRARIES:
        if one.function == function and (peers.ALL[name].backend == "mosaic_tpu") == (
            one.distribution == "tokamax"
        ):
            right = one.stand_in
    if function.startswith("Sampler"):
        right = right.gather_logprobs
    for stand_in, said in ((moved, "TypeError"), (wrong, "AssertionError")):
        if function.startswith("Sampler"):
            stand_in = type("Sampler", (), {"gather_logprobs": staticmethod(stand_in)})
        with peer_stand_ins.in_place(**{function: stand_in}):
            found = told(name)
        assert not found["ok"]
        assert found["error"].startswith(said)


def test_every_job_of_peers_has_a_contender_of_ours():
    jobs = {job for job, _ in times.SHAPES}
    assert {peer.job for peer in peers.ALL.values()} <= jobs
    for name in peers.ALL:
        assert peers.calls_of(name, full=False)
        assert set(peers.calls_of(name, full=False)) <= set(peers.calls_of(name, full=True))


@pytest.mark.parametrize("job", [times.DRAW, times.LINEAR, times.GREEDY])
def test_our_contenders_of_these_jobs_run(job):
    shape = peers.REHEARSED_PEERS.get(job, times.REHEARSED[1])
    found = times.measure(job, shape, "mosaic_gpu", rehearse=True)
    assert found["us"]
    assert not found["absent"]
