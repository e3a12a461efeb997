"""A model that is not this package's, in the loop and in a worker of an engine."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jax_specdec.control import Commit, Prepare, Start
from jax_specdec.declaration import Serves
from jax_specdec.device.drafting import NgramDrafter, make_drafter
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.model import KVCache
from jax_specdec.device.model.sharding import Parallel
from jax_specdec.device.worker.worker_process import make_worker
from jax_specdec.engine.config import EngineConfig
from jax_specdec.requests import SamplingParams
from tests.support import decoding
from tests.support.shards import mesh_of

V, E, BACK = 32, 8, 3


@dataclass(frozen=True)
class Fading:
    """Its hidden state is a sum over the last tokens' embeddings, each half as much as the next."""

    vocab_size: int = V
    dtype: str = "float32"

    def init_cache(self, num_slots, length):
        return KVCache(*(jnp.zeros((1, num_slots, length, 1, E)) for _ in range(2)))

    def forward(self, params, tokens, positions, cache):
        slots, length = jnp.arange(tokens.shape[0])[:, None], cache.k.shape[2]
        places = jnp.where(positions < 0, length, positions)
        rows = params["embedding"][tokens]
        k = cache.k.at[0, slots, places, 0].set(rows, mode="drop")
        hidden = 0
        for back in range(BACK):
            seen = k[0, slots, jnp.maximum(positions - back, 0), 0]
            hidden += jnp.where((positions >= back)[..., None], seen, 0) / 2**back
        return jnp.tanh(hidden), KVCache(k, cache.v)

    def logits(self, params, hidden):
        return hidden @ params["head"]


def params():
    rng = np.random.default_rng(4)
    return {
        "embedding": jnp.asarray(rng.normal(size=(V, E)), jnp.float32),
        "head": jnp.asarray(rng.normal(size=(E, V)) * 2, jnp.float32),
    }


def continued(prompt, count):
    """Greedy decoding in NumPy."""
    weights, ids = {name: np.asarray(x, np.float64) for name, x in params().items()}, list(prompt)
    for _ in range(count):
        last = ids[: -BACK - 1 : -1]
        hidden = sum(weights["embedding"][id] / 2**back for back, id in enumerate(last))
        ids.append(int((np.tanh(hidden) @ weights["head"]).argmax()))
    return ids[len(prompt) :]


PROMPTS = [list(range(1, 21)), [5], [9, 2, 9, 2, 9], [30, 31]]
REQUESTS = [
    decoding.request(str(at), prompt, max_tokens=20, logprobs=2)
    for at, prompt in enumerate(PROMPTS)
]


def test_the_loop_decodes_what_the_model_says():
    run = decoding.run(REQUESTS, NgramDrafter(2), num_slots=2, model=(params(), Fading()))
    found = [run.token_ids(one.id) for one in REQUESTS]
    assert found == [continued(prompt, 20) for prompt in PROMPTS]
    assert sum(int(output.num_drafts.sum()) for output in run.outputs) > 20
    assert all(record.logprobs.shape[1] == 3 for record in run.records["0"])


@pytest.mark.fast
def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(ValueError, match="Fading is a model of your own, which runs on one device"):
        LoopConfig(Fading(), NgramDrafter(2), 2, 32, parallel=Parallel(mesh_of(2)))
    for name in ("mtp", "model"):
        with pytest.raises(ValueError, match=f"the drafter {name} is not for a model of your own"):
            make_drafter(name, 2, Fading())
    for change, message in (
        ({"own_model": "a"}, "own_model = 'a' must be module:function"),
        ({"drafter": "mtp"}, "drafter = 'mtp' is not for"),
        ({"tensor_parallel": 2}, "tensor_parallel = 2 is not for"),
        ({"row_tile": 12}, "row_tile = 12 must be a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**change)


def config(**changes):
    given = {"vocab_size": V, "own_model": f"{__name__}:make", "drafter": "ngram",
             "serves": Serves.of([SamplingParams(temperature=1.0, logprobs=5)])}  # fmt: skip
    return EngineConfig(**given | changes)


def worker_of(**changes):
    return make_worker(Start(config=config(**changes).worker, ring=""), decoding.Sent())


def nothing(config):
    return config


@pytest.mark.fast
def test_a_function_that_is_not_there_or_makes_no_model_is_named(capsys):
    for changes, said in (
        ({"own_model": "nowhere:make"}, "cannot be found: No module named 'nowhere'"),
        ({"own_model": f"{__name__}:made"}, "has no attribute 'made'"),
        ({"own_model": f"{__name__}:nothing"}, "returned no (params, OwnModel)"),
        ({"batch_invariant": True}, "batch_invariant = True, but Fading has no row_tile"),
    ):
        with pytest.raises(SystemExit):
            worker_of(**changes)
        assert said in capsys.readouterr().err


@pytest.mark.fast
def test_parameters_come_from_a_file_where_one_is_named(tmp_path):
    """By the names of the tree; an update reads the same files."""
    path = str(tmp_path / "model.safetensors")
    first = {name: np.asarray(x) for name, x in params().items()}
    other = {name: x * 2 for name, x in first.items()}
    save_file(other, path)
    worker = worker_of(weights=path, weights_version=7, prefix_reuse=False)
    assert (worker.weights_version, worker.prefix_reuse) == (7, False)
    np.testing.assert_array_equal(worker.params["head"], other["head"])
    save_file(first, path)
    worker.apply(Prepare(number=1, path=path))
    worker.apply(Commit(number=1, version=8))
    np.testing.assert_array_equal(worker.params["head"], first["head"])
    for name, wrong, said in (
        ("head", other["head"].astype(np.int32), "head is stored as int32, and a float type"),
        ("head", other["head"][:3], r"head has shape (3, 32), its configuration wants (8, 32)"),
        ("tail", other["head"], "it lacks [] and has besides ['tail']"),
    ):
        save_file(other | {name: wrong}, path)
        worker.apply(Prepare(number=2, path=path))
        assert said in worker.next_weights.refusal


def make(config):
    return params(), Fading()
