"""The jax door: verify drafts, take logprobs and pack them, in a loop of your own or in ours.

This door is all of the device's side that docs, examples and users import; what lies behind it may
change. Only this folder of the package imports jax. Its rooms; each may import those above it:

    model      the decoder, its weights, and how both are spread over devices
    sampling   a row's distribution, draws from it, and verification
    drafting   who proposes drafts
    messages   the logprobs of accepted rows, packed into the words of a message
    loop       the state of a batch of requests and the step that moves it
    worker     the process that runs the loop and sends its messages
"""

from jax_specdec.checkpoint.model_config import ModelConfig
from jax_specdec.device.drafting.adaptive import Adaptive
from jax_specdec.device.drafting.corpus import Corpus
from jax_specdec.device.drafting.drafters import (
    Drafter,
    MtpDrafter,
    NgramDrafter,
    NoDrafter,
    draw,
    joined,
)
from jax_specdec.device.drafting.from_function import CallableDrafter
from jax_specdec.device.drafting.suffix import SuffixDrafter
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.row_logprobs import Asked, Widths, asked_of, widths_of
from jax_specdec.device.messages.step_messages import draft_message, step_output, target_message
from jax_specdec.device.model import llama, mtp
from jax_specdec.device.model.checkpoint import load_model
from jax_specdec.device.model.params import ModelParams, init_params
from jax_specdec.device.sampling.distribution import Sampling
from jax_specdec.device.sampling.verify import Drafts, Verified, verify
from jax_specdec.device.worker.device_checks import check
from jax_specdec.device.worker.worker import Worker

__all__ = [
    # One step: verify, and the messages of what was emitted.
    "verify",
    "Verified",
    "Drafts",
    "Sampling",
    "draw",
    "joined",
    "Asked",
    "Widths",
    "asked_of",
    "widths_of",
    "step_output",
    "target_message",
    "draft_message",
    "check",
    # Drafters.
    "Drafter",
    "NoDrafter",
    "NgramDrafter",
    "SuffixDrafter",
    "Corpus",
    "MtpDrafter",
    "CallableDrafter",
    "Adaptive",
    # The loop that comes with the package, and its model.
    "Worker",
    "LoopConfig",
    "Compiled",
    "load_model",
    "init_params",
    "ModelConfig",
    "ModelParams",
    "llama",
    "mtp",
]
