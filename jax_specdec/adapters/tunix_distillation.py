"""A strategy for tunix' `DistillationTrainer` whose loss needs no logits of student or teacher."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_specdec.adapters.heads import ModelHead
from jax_specdec.adapters.support_losses import (
    DivergenceName,
    Support,
    check_labels,
    check_numbers,
    cross_entropy,
    divergence_from_support,
    top_support,
)
from jax_specdec.adapters.tunix_heads import without_head


def support_strategy(
    student_forward_fn: Callable[..., jax.Array],
    teacher_forward_fn: Callable[..., jax.Array],
    labels_fn: Callable[..., jax.Array],
    *,
    k: int = 64,
    temperature: float = 2.0,
    alpha: float = 0.5,
    divergence: DivergenceName = "forward",
) -> Any:
    """A strategy like tunix' `LogitStrategy`, of hidden states and heads.

    The forward functions stay as they are: their models have no head here, so that what they return
    are the last hidden states. They may cut positions, and may not look at the last axis.

    Args:
      student_forward_fn, teacher_forward_fn: of a model of `tunix_heads.MODELS` and the inputs, to
        logits [B, S, V] with a head.
      labels_fn: of the inputs, to ids [B, S], -1 where a position has no label; not one-hot rows.
      k: tokens of the teacher's support, up to 512; the others are one bucket.
      temperature, alpha: as `LogitStrategy` has them: the loss is alpha times the divergence at
        this temperature, times its square, and 1 - alpha times the cross entropy; means over all
        positions.
      divergence: "forward", "reverse" or "jensen_shannon", as `linear_support_kl` has them.

    Raises:
      ImportError: tunix is not installed.
      ValueError: a temperature or a weight that is none.
    """
    check_numbers(temperature, alpha)
    base = importlib.import_module("tunix.distillation.strategies.base_strategy")

    class SupportStrategy(base.BaseStrategy):  # type: ignore[name-defined]
        def get_teacher_outputs(self, teacher_model: Any, inputs: dict[str, Any]) -> Support:
            hidden, head = _hidden(self._teacher_forward_fn, teacher_model, inputs)
            return jax.lax.stop_gradient(top_support(hidden, head, k, temperature))

        def get_student_outputs(
            self, student_model: Any, inputs: dict[str, Any]
        ) -> tuple[jax.Array, ModelHead]:
            return _hidden(self._student_forward_fn, student_model, inputs)

        def compute_loss(
            self,
            student_output: tuple[jax.Array, ModelHead],
            teacher_output: Support,
            labels: jax.Array,
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            kl = divergence_from_support(
                *student_output, teacher_output, temperature, divergence
            ).mean()
            hard, _ = self.compute_eval_loss(student_output, labels)
            soft = kl * temperature**2
            metrics = {"distill/soft_loss": soft, "distill/hard_loss": hard, "distill/kl_div": kl}
            return alpha * soft + (1 - alpha) * hard, metrics

        def compute_eval_loss(
            self, student_output: tuple[jax.Array, ModelHead], labels: jax.Array
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            hidden, head = student_output
            check_labels(labels, hidden)
            return cross_entropy(hidden, head, labels).mean(), {}

        def get_eval_loss(
            self, student_model: Any, inputs: dict[str, Any]
        ) -> tuple[jax.Array, dict[str, jax.Array]]:
            hidden, head = self.get_student_outputs(student_model, inputs)
            output = jax.lax.stop_gradient(hidden), head
            return self.compute_eval_loss(output, self._labels_fn(**inputs))

    return SupportStrategy(student_forward_fn, teacher_forward_fn, labels_fn)


def _hidden(
    forward: Callable[..., jax.Array], model: Any, inputs: dict[str, Any]
) -> tuple[jax.Array, ModelHead]:
    """The function's result of the model without its head, and the head."""
    nnx = importlib.import_module("flax.nnx")
    copy, head = without_head(nnx.merge(*nnx.split(model), copy=True))
    return jnp.asarray(forward(copy, **inputs)), head
