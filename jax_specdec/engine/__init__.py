"""The door without jax: requests in, records of tokens and logprobs out.

`Engine` runs requests on worker processes; what may go wrong is in `errors`. An engine of your own
uses `decode`, from bytes to a validated message, and `output_processor`, from a message to records;
both are pure functions.

Docs, examples and users import this door, and `jax_specdec.export` for common formats; the modules
behind them may change. Nothing here imports jax.
"""

import jax_specdec.beside.ipc  # noqa: F401
from ipc.wire import LogprobsMode
from jax_specdec import control
from jax_specdec.control import WorkerConfig
from jax_specdec.declaration import EVERYTHING, Serves
from jax_specdec.engine import errors
from jax_specdec.engine.config import EngineConfig
from jax_specdec.engine.engine import Engine
from jax_specdec.engine.stream import Stream
from jax_specdec.engine.updates import Update, WorkerStatus
from jax_specdec.records import output_processor
from jax_specdec.records.batch import FinishReason, PromptRows, Statistics
from jax_specdec.records.decode import Message, decode
from jax_specdec.records.encode import SlotContents, encode
from jax_specdec.records.record import Record, Records, TokenRows
from jax_specdec.requests import Request, SamplingParams, Structured
from jax_specdec.text import byte_tokens

__all__ = [
    # Requests.
    "Request",
    "SamplingParams",
    "Structured",
    "LogprobsMode",
    # The engine and its workers.
    "Engine",
    "EngineConfig",
    "WorkerConfig",
    "Serves",
    "EVERYTHING",
    "Update",
    "WorkerStatus",
    "Stream",
    "errors",
    # Records.
    "Record",
    "Records",
    "TokenRows",
    "PromptRows",
    "FinishReason",
    "Statistics",
    # For an engine of your own: bytes to records, and commands to a worker.
    "decode",
    "Message",
    "output_processor",
    "encode",
    "SlotContents",
    "control",
    # The token ids of the model that comes with the package.
    "byte_tokens",
]
