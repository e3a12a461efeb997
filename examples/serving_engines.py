"""The logprob functions of two serving engines, replaced: same signatures, other cost.

    python examples/serving_engines.py

tpu-inference (layers/jax/sample/sampling.py) has `compute_and_gather_logprobs` and
`gather_logprobs`; sglang-jax (srt/layers/sampler.py) has `get_top_logprobs` and
`get_token_ids_logprobs`. Here each stands beside what is in their place today. Both run on a mesh
of eight CPU devices, two for rows and four for the vocabulary; their values are compared, then the
bytes that go to the host and those that travel between the devices.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import logprobs_tensors, padded_token_ids, topk_logprobs

B, V, K = 32, 32_000, 20


# ---- tpu-inference: arrays with automatic axes
@partial(jax.jit, static_argnames="max_logprobs")
def compute_and_gather_logprobs(logits, next_tokens, max_logprobs):
    """Straight from the logits: no log_softmax of them is ever stored."""
    return logprobs_tensors(logits, next_tokens, max_logprobs)


# Where only logprobs are at hand: they are their own log_softmax.
def gather_logprobs(logprobs, token_ids, num_logprobs):
    return compute_and_gather_logprobs(logprobs, token_ids, num_logprobs)


# ---- sglang-jax: arrays with explicit axes "data" and "tensor"


def get_top_logprobs(logprobs, top_logprobs_nums, mesh=None):
    """Values and ids [B, max_k], split as the rows are; the vocabulary axis is not gathered.

    Logits will do as well as logprobs. `mesh` is not needed: the array's type names it.
    """
    no_token = jnp.zeros(logprobs.shape[0], jnp.int32)
    top = topk_logprobs(logprobs, no_token, max(top_logprobs_nums))
    return top.logprobs[:, 1:], top.token_ids[:, 1:]


def get_token_ids_logprobs(logprobs, token_ids_logprobs, mesh=None):
    """Values [B, C]: request b reads the first len(token_ids_logprobs[b]) of its row.

    What stands there today returns all logprobs [B, V], of which the host then picks the columns.
    """
    no_token = jnp.zeros(logprobs.shape[0], jnp.int32)
    chosen = jnp.asarray(padded_token_ids(token_ids_logprobs))
    return topk_logprobs(logprobs, no_token, 0, extra_token_ids=chosen).extra_logprobs


# ---- what they do today, in short


@partial(jax.jit, static_argnames="max_logprobs")
def gather_today(logits, next_tokens, max_logprobs):
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    top, ids = jax.lax.top_k(logprobs, max_logprobs)
    own = jnp.take_along_axis(logprobs, next_tokens[:, None], axis=-1)
    ranks = jnp.sum(logprobs >= own, axis=-1)
    return jnp.concatenate([next_tokens[:, None], ids], 1), jnp.concatenate([own, top], 1), ranks


def top_today(logprobs, top_logprobs_nums, mesh):
    whole = jax.sharding.reshard(logprobs, NamedSharding(mesh, P("data", None)))
    return jax.lax.top_k(whole, max(top_logprobs_nums))


def chosen_today(logprobs, token_ids_logprobs, mesh):
    return logprobs


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)


def nbytes(arrays):
    return sum(x.nbytes for x in arrays)


def between_devices(function, *arguments):
    """The bytes of all results of the program's collectives, on one device."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    total = 0
    for line in re.findall(r"= (.*?) (?:all-gather|all-reduce|all-to-all)(?:-start)?\(", text):
        for shape in re.findall(r"[fsu]32\[([\d,]*)\]", line):
            total += 4 * int(np.prod([int(n) for n in shape.split(",") if n], dtype=int))
    return total


def show(name, ours, today, host, devices):
    for a, b in zip(ours, today, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    print(f"{name:24} to the host {host[0]:>9,} B, today {host[1]:>9,} B;", end=" ")
    print(f"between devices {devices[0]:>9,} B, today {devices[1]:>9,} B")


def main() -> None:
    """Compare the functions with today's, and print what each moves."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 4, (B, V)).astype(np.float32)
    tokens = jnp.asarray(values.argmax(1), jnp.int32)

    mesh = mesh_of(AxisType.Auto)
    logits = jax.device_put(values, NamedSharding(mesh, P("data", "tensor")))
    ours = compute_and_gather_logprobs(logits, tokens, K)
    today = gather_today(logits, tokens, K)
    travel = [
        between_devices(partial(f, max_logprobs=K), logits, tokens)
        for f in (compute_and_gather_logprobs, gather_today)
    ]
    show("gather_logprobs", ours, today, (nbytes(ours), nbytes(today)), travel)

    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        logits = jax.device_put(values, NamedSharding(mesh, P("data", "tensor")))
        logprobs = jax.jit(jax.nn.log_softmax)(logits)
        nums = [K] * (B // 2) + [5] * (B // 2)
        ours, today = get_top_logprobs(logits, nums), top_today(logprobs, nums, mesh)
        travel = [
            between_devices(lambda x, f=f: f(x, nums, mesh), logprobs)
            for f in (get_top_logprobs, top_today)
        ]
        show("get_top_logprobs", ours, today, (nbytes(ours), nbytes(today)), travel)

        wanted = [[b, 7, V - 1] if b % 2 else None for b in range(B)]
        gathered = np.asarray(get_token_ids_logprobs(logits, wanted))
        whole = np.asarray(chosen_today(logprobs, wanted, mesh))
        picked = [(gathered[b, : len(ids)], whole[b, ids]) for b, ids in enumerate(wanted) if ids]
        travel = [
            between_devices(lambda x, f=f: f(x, wanted, mesh), logprobs)
            for f in (get_token_ids_logprobs, chosen_today)
        ]
        ours, today = zip(*picked, strict=True)
        show("get_token_ids_logprobs", ours, today, (gathered.nbytes, whole.nbytes), travel)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
