"""What is measured side by side: a function of each peer, and the adapter's, of the same arrays."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec.adapters import maxtext, sglang_jax, tpu_inference, tunix
from jax_specdec.adapters.heads import ModelHead
from jax_specdec.adapters.support_losses import Support, divergence_from_support
from pallas_kernels.testing import checks
from pallas_kernels.testing.shapes import Shape

HIDDEN = 512
SUPPORT = 20  # tokens of a teacher's support
PROMPT = 8
PEAKED, WHOLE, FLAT = "top-k 50, top-p 0.9", "a whole q, top-k 50, top-p 0.9", "flat, top-p 0.9"
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Two functions that compute the same; both are jitted, unless `calls` says how they run."""

    name: str
    shape: Shape
    theirs: Call
    ours: Call
    arguments: tuple[Any, ...]
    trains: bool = False  # whether the limit of a trainer's memory applies
    to_host: int | None = None  # bytes a call; None: all stays on the device
    calls: tuple[Callable[[], Any], Callable[[], Any]] | None = None
    compared: tuple[Any, ...] | None = None  # arguments of equal results, where those draw

    def with_gradient(self) -> "Case":
        """The same with derivatives by the first argument."""

        def of(call: Call) -> Call:
            def both(x: Any, weights: jax.Array, *others: Any) -> Any:
                found, pull = jax.vjp(lambda x: call(x, *others), x)
                return found, pull(weights)[0]

            return both

        found = jax.eval_shape(self.theirs, *self.arguments)
        weights = jnp.linspace(0.5, 1.5, found.size, dtype=found.dtype).reshape(found.shape)
        return replace(
            self, name=f"{self.name} and gradient", theirs=of(self.theirs), ours=of(self.ours),
            arguments=(self.arguments[0], weights, *self.arguments[1:]),
        )  # fmt: skip


def of_tunix(shape: Shape) -> Iterator[Case]:
    """Entropies of logits, and logprobs of hidden states, as in a policy's loss."""
    common, core = (importlib.import_module(f"tunix.rl.{name}") for name in ("common", "algo_core"))
    if shape.k == SUPPORT:
        logit = importlib.import_module("tunix.distillation.strategies.logit")
        loss = logit.LogitStrategy(*[abs] * 3, temperature=1.0).compute_loss
        yield from _distillation("LogitStrategy", shape, lambda *x: loss(*x)[1]["distill/kl_div"])
    if shape.k:
        return
    logits = checks.random_logits(shape, 0)
    name = "compute_entropy_from_logits"
    entropy = getattr(core, name), getattr(tunix, name)
    for case in (Case(name, shape, *entropy, (logits,), trains=True), _of_model(shape, common)):
        yield from (case, case.with_gradient())


def _of_model(shape: Shape, common: Any) -> Case:
    """`compute_per_token_logps` of a model of one layer, by its weights."""
    nnx, qwen2 = (importlib.import_module(n) for n in ("flax.nnx", "tunix.models.qwen2.model"))
    config = qwen2.ModelConfig(
        num_layers=1, vocab_size=shape.vocabulary, embed_dim=HIDDEN, hidden_dim=HIDDEN, num_heads=4,
        head_dim=64, num_kv_heads=1, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
        dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip
    graph, state = nnx.split(qwen2.Qwen2(config, rngs=nnx.Rngs(0)))
    ids = jnp.maximum(checks.random_ids(shape), 1)[None]

    def of(call: Call) -> Call:
        return lambda state, ids: call(
            graph, state, ids[:, :PROMPT], ids, pad_id=0, eos_id=shape.vocabulary,
            stop_gradient=False,
        )  # fmt: skip

    name = "compute_per_token_logps"
    theirs, ours = of(getattr(common, name)), of(getattr(tunix, name))
    return Case(name, shape, theirs, ours, (state, ids), trains=True)


def of_maxtext(shape: Shape) -> Iterator[Case]:
    """A teacher's top K logits, from its last hidden states [1, R, H] and its head [H, V]."""
    script = importlib.import_module(
        "maxtext.trainers.post_train.distillation.save_top_k_teacher_logits"
    )
    if not shape.k:
        return
    keys = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(keys[0], (1, shape.rows, HIDDEN))
    head = jax.random.normal(keys[1], (HIDDEN, shape.vocabulary)) / HIDDEN**0.5

    def theirs(hidden: jax.Array, head: jax.Array) -> Any:
        return script.get_top_k_logits(hidden @ head, shape.k)

    def ours(hidden: jax.Array, head: jax.Array) -> Any:
        return maxtext.top_k_logits(hidden, head, shape.k, head_axes="HV")

    size = 8 * shape.rows * shape.k
    yield Case("get_top_k_logits", shape, theirs, ours, (hidden, head), True, size)
    if shape.k == SUPPORT:
        utils = importlib.import_module(
            "maxtext.trainers.post_train.distillation.distillation_utils"
        )
        combined = utils.CombinedDistillationStrategy(
            abs, abs, temperature=1.0, vocab_size=shape.vocabulary
        )

        def divergence(student: jax.Array, teacher: jax.Array, labels: jax.Array) -> Any:
            output = utils.DistillationForwardOutput
            metrics = combined.compute_loss(output(student), output(teacher), labels)[1]
            return metrics[utils.METRIC_KL_DIV_AT_T][0] / shape.rows

        yield from _distillation("CombinedDistillationStrategy", shape, divergence)


def _distillation(name: str, shape: Shape, theirs: Call) -> Iterator[Case]:
    """The divergence that a strategy has, of a student's hidden states and head; its mean.

    The teacher gives something to its support alone, so that both divergences are one. Theirs takes
    its logits [1, R, V] and one-hot labels, which are made before and not counted.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (1, shape.rows, HIDDEN))
    head = jax.random.normal(keys[1], (shape.vocabulary, HIDDEN)) / HIDDEN**0.5
    scores = jax.random.normal(keys[2], (1, shape.rows, shape.vocabulary))
    ids = jax.lax.top_k(scores, SUPPORT)[1]
    logprobs = jax.nn.log_softmax(jax.random.normal(keys[3], ids.shape))
    row = jnp.arange(shape.rows)[:, None]
    teacher = jnp.full_like(scores, -1e9).at[0, row, ids[0]].set(logprobs[0])
    labels = jax.nn.one_hot(jnp.maximum(checks.random_ids(shape), 1)[None], shape.vocabulary)

    def of_logits(student: tuple[jax.Array, jax.Array], *others: Any) -> jax.Array:
        divergence: jax.Array = theirs(student[0] @ student[1].T, *others[:2])
        return divergence

    def of_support(student: tuple[jax.Array, jax.Array], *others: Any) -> jax.Array:
        head = ModelHead(student[1], "VH", jnp.float32, None)
        return divergence_from_support(
            student[0], head, Support(*others[2:]), 1.0, "forward"
        ).mean()

    arguments = (hidden, head), teacher, labels, ids, logprobs
    case = Case(f"{name}, divergence", shape, of_logits, of_support, arguments, trains=True)
    yield from (case, case.with_gradient())


def of_sglang_jax(shape: Shape) -> Iterator[Case]:
    """The sampler's logprobs of greedy requests; its lists are made outside of jit."""
    sampler, processor, batch = (
        importlib.import_module(f"sgl_jax.srt.{name}")
        for name in ("layers.sampler", "layers.logits_processor", "sampling.sampling_batch_info")
    )
    own = sampler.Sampler(importlib.import_module("flax.nnx").Rngs(0))
    logits, ids = checks.random_logits(shape, 0), checks.random_ids(shape)
    fields = {field.name: None for field in dataclasses.fields(batch.SamplingMetadata)} | {
        "return_logprob": True, "is_all_greedy": True, "do_penalties": False,
        "top_logprobs_nums": [shape.k] * shape.rows, "temperatures": jnp.ones((shape.rows, 1)),
    }  # fmt: skip
    asked = batch.SamplingMetadata(**fields)
    logprobs = jax.jit(lambda logits: own._greedy_sampling((logits, None, None, None))[1])

    def of(write: Callable[[Any], Any]) -> Callable[[], Any]:
        def call() -> Any:
            output = processor.LogitsProcessorOutput(logits)
            write(output)
            top = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
            return jax.block_until_ready(output.next_token_logprobs), *top

        return call

    calls = (
        of(lambda out: own._process_logprob_results((out, asked, ids, logprobs(logits)))),
        of(lambda out: sglang_jax.add_logprobs(out, asked, ids)),
    )

    def read(logits: jax.Array) -> Any:
        extra = np.zeros((shape.rows, 0), np.int32)
        return sglang_jax._read(logits, ids, None, asked.temperatures, True, extra, shape.k)

    size = 4 * shape.rows * (2 * shape.k + 1)
    name = "return_logprob"
    yield Case(name, shape, logprobs, read, (logits,), to_host=size, calls=calls)


def of_tpu_inference(shape: Shape) -> Iterator[Case]:
    """Logprobs of sampled tokens, and of a chunk of a prompt; a step's tokens and logprobs."""
    sampling = importlib.import_module("tpu_inference.layers.jax.sample.sampling")
    logits, ids = checks.random_logits(shape, 0), checks.random_ids(shape)

    def of(module: Any, name: str) -> Call:
        return lambda logits, ids: tuple(getattr(module, name)(logits, ids, shape.k))[:3]

    size = 4 * shape.rows * (2 * shape.k + 3)
    names = ["compute_and_gather_logprobs"]
    names += ["compute_and_gather_prompt_logprobs"] if shape.rows >= 1024 else []
    for name in names:
        yield Case(
            name, shape, of(sampling, name), of(tpu_inference, name), (logits, ids), to_host=size
        )
    if (shape.rows, shape.k) == (64, 20):
        yield from (_step(shape.vocabulary, kind) for kind in (PEAKED, WHOLE, FLAT))


def _step(vocabulary: int, kind: str) -> Case:
    """A step of 8 requests with 4 drafts each, as their runner makes it: the tokens, and logprobs.

    Logits are a peaked head with a long tail, and are drawn by top-k 50 and top-p 0.9; or flat
    ones, by top-p 0.9 alone. What both emit where top-k is 1 is compared. Their runner has no q of
    its drafts; their sampler takes one.
    """
    sampling, rejection, metadata = (
        importlib.import_module(f"tpu_inference.layers.jax.sample.{name}")
        for name in ("sampling", "rejection_sampler", "sampling_metadata")
    )
    utils = importlib.import_module("tpu_inference.spec_decode.jax.utils")
    shape, is_flat = Shape(40, vocabulary, 20, "bfloat16"), kind == FLAT
    keys = jax.random.split(jax.random.key(0), 3)
    logits = (0.1 if is_flat else 0.3) * jax.random.normal(keys[0], (shape.rows, vocabulary))
    if not is_flat:
        logits -= 2 * jnp.log(jnp.arange(1, vocabulary + 1))
        logits = jax.random.permutation(keys[1], logits, axis=1, independent=True)
    top = jnp.arange(shape.rows), jnp.argmax(logits, axis=1)
    logits = logits.at[top].add(1).astype(shape.dtype)  # one largest, so that top-k 1 is one token
    bonus = jnp.arange(4, shape.rows, 5)
    target = jnp.delete(jnp.arange(shape.rows), bonus)
    drafts = jnp.argmax(logits[target], axis=1).astype(jnp.int32)
    mesh = jax.sharding.get_mesh()
    q = jax.nn.softmax(logits[target].astype(jnp.float32)) if kind == WHOLE else None

    def options(top_k: int) -> Any:
        return metadata.TPUSupportedSamplingMetadata(
            temperature=jnp.full(8, 0.8), top_k=jnp.full(8, top_k, jnp.int32),
            top_p=jnp.full(8, 0.9), do_sampling=True, logprobs=True,
        )  # fmt: skip

    def of(module: Any, sampler: Any) -> Call:
        def step(logits: jax.Array, q: Any, key: jax.Array, options: Any) -> Any:
            first, last = logits[target], logits[bonus]
            bonus_key, draft_key = jax.random.split(key)
            tokens, _ = module.sample(bonus_key, mesh, last, options)
            num = jnp.full(8, 4, jnp.int32)
            tokens = sampler(mesh)(drafts, num, q, first, tokens, options, draft_key)
            rows = utils.extend_logits_simple(first, last, mesh)
            return tuple(module.compute_and_gather_logprobs(rows, tokens, shape.k))[:3]

        return step

    arguments = logits, q, keys[2]
    return Case(
        f"step, 8 requests x 4 drafts, {kind},", shape, of(sampling, rejection.RejectionSampler),
        of(tpu_inference, tpu_inference.RejectionSampler),
        (*arguments, options(0 if is_flat else 50)),
        to_host=4 * shape.rows * (2 * shape.k + 3), compared=(*arguments, options(1)),
    )  # fmt: skip


# By the peer's package: its distribution, what the tables call it, and its cases of a shape.
OF: dict[str, tuple[str, str, Callable[[Shape], Iterator[Case]]]] = {
    "tunix": ("google-tunix", "tunix", of_tunix),
    "maxtext": ("maxtext", "MaxText", of_maxtext),
    "sglang_jax": ("sglang-jax", "sglang-jax", of_sglang_jax),
    "tpu_inference": ("tpu-inference", "tpu-inference", of_tpu_inference),
}
GRID = tuple(
    Shape(rows, vocabulary, k, "float32")
    for vocabulary in (32_000, 151_936)
    for rows in (8, 64, 1024)
    for k in (0, 5, 20)
)
QUICK = tuple(one for one in GRID if (one.rows, one.vocabulary) == (64, 32_000) and one.k != 5)
