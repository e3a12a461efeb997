"""The rotary positions in a Hugging Face configuration, in every spelling.

`rope_parameters` (transformers 5), and `rope_theta` and `rope_scaling` (before). Gemma 3 has two
sets: nested by the kind of layer, or `rope_local_base_freq` beside the others.
"""

from collections.abc import Mapping
from typing import Any

from jax_specdec.checkpoint.rope_scaling import RopeScaling, yarn_attention_factor

KNOWN = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor",
    "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "attention_factor", "mscale", "mscale_all_dim", "truncate", "finetuned",
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def read_rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The rotary base, and how the frequencies are slowed down.

    Raises:
      KeyError: a number is missing.
      ValueError: something of it is not supported.
    """
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", fields.get("rope_theta", 10_000.0)))
    for where in (rope, fields):
        if where.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"partial_rotary_factor = {where['partial_rotary_factor']!r} is not supported, "
                "only 1: the decoder turns every value of a head"
            )
    if unknown := sorted(rope.keys() - KNOWN):
        raise ValueError(
            f"rotary positions have a field {unknown[0]} = {rope[unknown[0]]!r}, which is not "
            "known here: results could change without it"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            _original_length(rope, fields),
        )
    if kind == "yarn":
        return theta, _yarn(rope, fields)
    raise ValueError(
        f"rotary positions of type {kind!r} are not supported; supported are default, linear, "
        "llama3 and yarn"
    )


def read_rope_by_kind(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None, float]:
    """`read_rope` of full layers, and the rotary base of sliding ones (Gemma 3)."""
    rope = fields.get("rope_parameters") or {}
    if not {FULL, SLIDING} & rope.keys():
        return *read_rope(fields), float(fields.get("rope_local_base_freq", 10_000.0))
    defaults = {FULL: 1_000_000.0, SLIDING: 10_000.0}
    if unknown := sorted(rope.keys() - defaults.keys()):
        raise ValueError(f"rope_parameters of {unknown[0]!r} are not supported")
    (theta, scaling), (sliding, own) = (
        read_rope({**fields, "rope_theta": default, "rope_parameters": rope.get(kind) or {}})
        for kind, default in defaults.items()
    )
    if own is not None:
        raise ValueError(f"rotary positions of sliding layers must be default, not {own.kind!r}")
    return theta, scaling, sliding


def _yarn(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> RopeScaling:
    length = _original_length(rope, fields)
    factor = rope["factor"]
    factor = float(fields["max_position_embeddings"] / length if factor is None else factor)
    attention = rope.get("attention_factor")
    if attention is None:
        scales = (float(rope.get(name) or 0) for name in ("mscale", "mscale_all_dim"))
        attention = yarn_attention_factor(factor, *scales)
    return RopeScaling(
        "yarn",
        factor,
        float(rope.get("beta_slow") or 1),
        float(rope.get("beta_fast") or 32),
        length,
        float(attention),
        bool(rope.get("truncate", True)),
    )


def _original_length(rope: Mapping[str, Any], fields: Mapping[str, Any]) -> int:
    """Positions of the first training; a field beside the others counts first."""
    name = "original_max_position_embeddings"
    length = fields.get(name) or rope.get(name)
    return int(fields["max_position_embeddings"] if length is None else length)
