"""A strategy for MaxText's distillation trainer that needs no logits of student or teacher."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.adapters.heads import ModelHead
from jax_specdec.adapters.maxtext_heads import check_model, hidden_and_head
from jax_specdec.adapters.support_losses import (
    DivergenceName,
    Support,
    check_labels,
    check_numbers,
    cross_entropy,
    divergence_from_support,
    top_support,
)

_MODULE = "maxtext.trainers.post_train.distillation.distillation_utils"
Loss = tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]


def support_strategy(
    *,
    vocab_size: int,
    pad_id: int = 0,
    k: int = 64,
    temperature: float = 2.0,
    alpha: float = 0.5,
    divergence: DivergenceName = "forward",
) -> Any:
    """A strategy like MaxText's `CombinedDistillationStrategy`, of hidden states and heads.

    It calls the models itself, without dropout. Features, losses of experts and schedules are not
    served; a teacher's output from a file has no logprobs, and is refused.

    Args:
      vocab_size, pad_id: as MaxText has them; a target of `pad_id` counts nowhere.
      k: tokens of the teacher's support, up to 512; the others are one bucket.
      temperature, alpha: the loss is alpha times the divergence at this temperature, times its
        square, and 1 - alpha times the cross entropy; means over the positions that count.
      divergence: "forward", "reverse" or "jensen_shannon", as `linear_support_kl` has them.

    Raises:
      ImportError: MaxText is not installed.
      ValueError: a temperature or a weight that is none.
      NotImplementedError: when it is called, a setting of a model that cannot be served, by name.
    """
    check_numbers(temperature, alpha)
    module = importlib.import_module(_MODULE)

    def student(model: Any, **inputs: Any) -> tuple[jax.Array, ModelHead]:
        return _of_model(model, inputs)

    def teacher(model: Any, **inputs: Any) -> Support:
        return top_support(*_of_model(model, inputs), k, temperature)

    class SupportStrategy(module.DistillationStrategy):  # type: ignore[name-defined]
        def compute_loss(
            self,
            student_output: tuple[jax.Array, ModelHead],
            teacher_output: Support,
            labels: jax.Array,
            step: jax.Array | None = None,
        ) -> Loss:
            if not isinstance(teacher_output, Support):
                raise NotImplementedError(
                    f"a teacher's output of {type(teacher_output).__name__}: its top K logits are "
                    "no logprobs; let the teacher run, or use MaxText's own strategy"
                )
            hard, metrics = self.compute_eval_loss(student_output, labels)
            kl = divergence_from_support(*student_output, teacher_output, temperature, divergence)
            counts = labels >= 0
            total = jnp.sum(jnp.where(counts, kl, 0))
            count = counts.sum().astype(jnp.float32)
            soft = total * temperature**2
            loss = alpha * soft / jnp.maximum(count, 1) + (1 - alpha) * hard
            return loss, {
                module.METRIC_SOFT_LOSS: (soft, count),
                module.METRIC_HARD_LOSS: metrics["eval/hard_loss"],
                module.METRIC_KL_DIV_AT_T: (total, count),
                module.METRIC_TOTAL_LOSS: (loss, jnp.ones(())),
            }

        def compute_eval_loss(
            self, student_output: tuple[jax.Array, ModelHead], labels: jax.Array
        ) -> Loss:
            hidden, head = student_output
            check_labels(labels, hidden)
            total, count = cross_entropy(hidden, head, labels).sum(), (labels >= 0).sum()
            loss = total / jnp.maximum(count, 1)
            return loss, {"eval/hard_loss": (total, count.astype(jnp.float32))}

        def create_labels(
            self, targets: jax.Array, targets_segmentation: jax.Array | None = None, **_: Any
        ) -> jax.Array:
            counts = targets != self.pad_id
            if targets_segmentation is not None:
                counts &= targets_segmentation != 0
            return jnp.where(counts, targets, -1)

    return SupportStrategy(student, teacher, vocab_size, pad_id)


def _of_model(model: Any, inputs: dict[str, Any]) -> tuple[jax.Array, ModelHead]:
    """The last hidden states and the head, by the arguments that MaxText's trainer gives."""
    check_model(model)
    nnx = importlib.import_module("flax.nnx")
    copy = nnx.merge(*nnx.split(model), copy=True)
    return hidden_and_head(
        copy,
        decoder_input_tokens=inputs["input_tokens"],
        decoder_positions=inputs["positions"],
        decoder_segment_ids=inputs.get("decoder_segment_ids"),
        enable_dropout=False,
    )
