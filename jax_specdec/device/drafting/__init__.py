"""Drafters: who proposes the tokens that the target model verifies.

A small door beside `jax_specdec.device`; what lies behind it may change. `draw` is for
loops that draft by themselves, `CallableDrafter` for a function of your own.
"""

from jax_specdec.device.drafting.by_name import make_drafter
from jax_specdec.device.drafting.draft_model import DraftModel
from jax_specdec.device.drafting.drafters import (
    Chunk,
    Context,
    Drafter,
    MtpDrafter,
    NgramDrafter,
    NoDrafter,
    ReportDrafts,
    draw,
)
from jax_specdec.device.drafting.from_function import CallableDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from pallas_kernels.sampling import CompactQ

__all__ = [
    "Drafter",
    "Context",
    "Chunk",
    "NoDrafter",
    "NgramDrafter",
    "SuffixDrafter",
    "MtpDrafter",
    "DraftModel",
    "CallableDrafter",
    "make_drafter",
    "draw",
    "CompactQ",
    "ReportDrafts",
]
