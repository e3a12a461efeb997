"""The jax door: verify drafts, take logprobs and pack them, in a loop of your own or in ours.

This door, and the smaller ones of `jax_specdec.device.drafting` and `jax_specdec.device.model`, are
all of the device's side that docs, examples and users import; what lies behind them may change.
Only this folder of the package imports jax. Its rooms; each may import those above it:

- `model`: the decoder, its weights, and how both are spread over devices
- `sampling`: a row's distribution, draws from it, and verification
- `drafting`: who proposes drafts
- `messages`: the logprobs of accepted rows, packed into the words of a message
- `loop`: the state of a batch of requests and the step that moves it
- `worker`: the process that runs the loop and sends its messages
"""

import jax_specdec.beside.ipc
import jax_specdec.beside.pallas_kernels  # noqa: F401
from jax_specdec.device import drafting, model
from jax_specdec.device.loop.programs import Compiled
from jax_specdec.device.loop.state import LoopConfig
from jax_specdec.device.messages.batch_options import (
    BatchOptions,
    Widths,
    options_of_requests,
    widths_of,
)
from jax_specdec.device.messages.pack import Stamp, select_rows
from jax_specdec.device.messages.row_logprobs import draft_rows, row_logprobs
from jax_specdec.device.messages.step_messages import (
    StepOutput,
    draft_message,
    step_output,
    target_message,
)
from jax_specdec.device.worker.outgoing import DeviceCheckError, check
from jax_specdec.device.worker.worker import Worker
from pallas_kernels.sampling import (
    Drafts,
    Sampling,
    Verified,
    kept_logprobs,
    learner_logprobs,
    verify,
)

__all__ = [
    # What a batch of requests asked for, as arrays.
    "BatchOptions",
    "Widths",
    "options_of_requests",
    "widths_of",
    "Sampling",
    # One step: verify, then the logprobs of what was emitted.
    "verify",
    "Drafts",
    "Verified",
    "row_logprobs",
    "draft_rows",
    "select_rows",
    # The learner's side of kept sets.
    "kept_logprobs",
    "learner_logprobs",
    # Its messages.
    "Stamp",
    "step_output",
    "StepOutput",
    "target_message",
    "draft_message",
    "check",
    "DeviceCheckError",
    # The loop that comes with the package.
    "Worker",
    "LoopConfig",
    "Compiled",
    # Who drafts; the model. Small doors of their own.
    "drafting",
    "model",
]
