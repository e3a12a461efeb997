"""Commands of the engine to its model worker, as values and as bytes.

A command is one msgpack array: its name, then its fields. Token ids are packed int32, so a prompt
of 128,000 tokens is copied, never written out. `Start` alone is a line of JSON: a worker gets it on
its standard input, before it has a socket.
"""

import json
import operator
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgpack

from ipc.wire import LogprobsMode
from jax_specdec.declaration import USUAL, Serves
from jax_specdec.requests import Request, SamplingParams, packed_ids, unpacked_ids

# A lead whose follower was killed by a signal exits with this plus the signal's number, as a shell
# does for a command.
GROUP_KILLED = 128


DRAFT_WIDTHS = ("adaptive", "fixed")  # the values of `WorkerConfig.draft_width`
DRAFTERS = ("mtp", "model", "ngram", "suffix", "none")  # the values of `WorkerConfig.drafter`
IMPLEMENTATIONS = ("xla", "mosaic_gpu", "mosaic_tpu")  # those of `WorkerConfig.implementation`


class ControlError(ValueError):
    """Bytes that are not a command; says what is wrong with them."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """The configuration of a worker: the part of `EngineConfig` that every worker is told.

    Attributes:
      vocab_size: ids below it are legal in a prompt; at most the model's.
      weights: a safetensors file, or a directory in Hugging Face layout; empty for the weights
        that come with the package.
        With `own_model`: a safetensors file of that model's parameters, by their paths in the tree,
        in place of those that its function returns.
      weights_version: the number of these weights, which their tokens carry; an update raises it.
      own_model: "module:function" for a model of your own, or empty. The worker imports the module
        and calls `function(config)` with this configuration; it returns the parameters and a
        `jax_specdec.device.model.OwnModel`.
      dtype: "bfloat16" or "float32", to compute in; empty for that of the weights. "float16" is for
        a safetensors file or the package's own weights only.
      drafter: "mtp", "model", "ngram", "suffix" or "none".
      draft_model: for "model", the weights of the smaller model that drafts, as those of `weights`;
        ids must mean the same in both. Otherwise empty.
      num_drafts: draft tokens a step at most.
      draft_width: "adaptive": each step verifies all drafts or none, as pays, by the times of steps
        and the fates of earlier drafts. "fixed": all of them. With a drafter
        that draws its drafts ("mtp", "model"), a seeded request repeats only at a fixed width. A
        worker with `processes` has one.
      tokenizer: a directory with the tokenizer.json that reads grammars; empty for that of
        `weights`, or bytes where there is none.
      num_slots: requests that decode together.
      max_length: prompt and emitted tokens of a request.
      prefill_chunk: prompt tokens that run between two steps.
      batch_invariant: a token's logprob has the same bits whatever else runs: other requests,
        slots, chunks, certain drafts, a reused prefix, a start again. `sequence_logprobs` gives
        them to a learner. Steps and prompts cost more (docs/same_bits.md). Of a model of your own,
        it asks for a `row_tile`.
      row_tile: for that, the rows that a product takes at once, a multiple of 8; `over_rows` says
        when it takes fewer. On a TPU, 128 fill the matrix unit.
      prefix_reuse: run what prompts have in common once, where a slot of the worker still holds it;
        no value depends on it. A prompt whose logprobs are wanted is always run whole.
      serves: what requests may ask for at most: all programs that it needs are compiled before a
        worker is ready, and a request beyond it is refused. `Serves` says what it is by default.
      starts_soon: for who waits for the first token of requests that are there already: steps
        without drafts are compiled while the first ones are made, and nothing is run before it is
        needed.
      compilation_cache: the folder in which compiled programs are kept for the next start; "off"
        for none. Empty: the user's cache directory ($XDG_CACHE_HOME or ~/.cache), or what jax's own
        variable JAX_COMPILATION_CACHE_DIR says.
      implementation: "xla", "mosaic_gpu" or "mosaic_tpu", for logprobs and draws; empty: kernels
        that passed `jax-specdec check-device` on this kind of device, else XLA. By name, a device
        that cannot run it is an error.
      tensor_parallel: devices among which each worker splits the model. A vocabulary that does not
        divide among them is padded. A worker without accelerators makes as many CPU devices.
      processes: each of these devices has a process of its own. The first one publishes; the worker
        is lost when any of them is.
      group_host: the host name or address at which the first of these processes is reached by the
        others' JAX.
      group_address: where they get their commands from it, as ZeroMQ writes it; empty for a socket
        on this host that only its user can reach.
      group_nodes: hosts that the devices are split over, in order; above 1 where somebody has
        placed the group on several.
      group_launcher: the socket file of who starts the processes on the other hosts; empty where
        there are none.
    """

    vocab_size: int
    weights: str = ""
    weights_version: int = 0
    own_model: str = ""
    dtype: str = ""
    drafter: str = "mtp"
    draft_model: str = ""
    num_drafts: int = 3
    draft_width: str = "adaptive"
    tokenizer: str = ""
    num_slots: int = 8
    max_length: int = 512
    prefill_chunk: int = 64
    batch_invariant: bool = False
    row_tile: int = 32
    prefix_reuse: bool = True
    serves: Serves = USUAL
    starts_soon: bool = False
    compilation_cache: str = ""
    implementation: str = ""
    tensor_parallel: int = 1
    processes: bool = False
    group_host: str = "127.0.0.1"
    group_address: str = ""
    group_nodes: int = 1
    group_launcher: str = ""

    @property
    def texts(self) -> str:
        """Whose tokenizer.json reads texts: a directory, or what means bytes."""
        return self.tokenizer or self.weights

    @property
    def devices_here(self) -> int:
        """Devices of the model on each of its hosts."""
        return self.tensor_parallel // self.group_nodes

    @property
    def num_processes(self) -> int:
        """Processes that compute one worker's model."""
        return self.tensor_parallel if self.processes else 1


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Where a process gets its commands, and as whom.

    Attributes:
      address: of the socket that the sender of the commands has bound, as ZeroMQ writes it.
      identity: the name of this process there. Nobody else knows it: it proves who asks.
      server_key: the sender's public CURVE key; empty where nothing is encrypted (ipc://).
    """

    address: str
    identity: str
    server_key: str = ""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A follower's place in its group.

    Attributes:
      index: its number, from 1; the lead has 0.
      coordinator: host and port of JAX's coordinator, which the lead runs.
    """

    index: int
    coordinator: str


@dataclass(frozen=True, kw_only=True)
class Start:
    """The first words to a process of a worker: what to run, and where it is heard.

    Attributes:
      config: the same for every worker of an engine.
      ring: the name of the ring to attach to; empty for a follower.
      process_rank: the worker's number, which its messages carry.
      prefill_only: run prompts, send first tokens, and hand the requests over.
      parent: the process id of who started it, and with whom it ends.
      control: where its commands come from; None: nobody sends any.
      folder: a directory of the engine for sockets of a worker's own, mode 0700.
      local_devices: places in `jax.local_devices()` of those that it may use; empty for all.
      resumes: for who takes the place of a lost worker: the least that serves the requests which
        wait for it. Programs for others are read beside their first steps. None: nobody waits.
      member: None except in a follower.
    """

    config: WorkerConfig
    ring: str
    process_rank: int = 0
    prefill_only: bool = False
    parent: int = 0
    control: Connection | None = None
    folder: str = ""
    local_devices: tuple[int, ...] = ()
    resumes: Serves | None = None
    member: Member | None = None


@dataclass(frozen=True, kw_only=True)
class Admit:
    """Run `request` in `slot`; its messages carry `generation`.

    `draft_token_ids` are drafts that a prefill node handed over: they are verified in the
    request's first step, as certain ones (no draft model's distribution came with them).
    """

    slot: int
    generation: int
    request: Request
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evict:
    """Take `slot` back from its request, if it is still that generation.

    The worker frees the slot and says so in its next message: preempted, to be scheduled again,
    or with `reschedule` false a recovery stop, which ends the request with an error.
    """

    slot: int
    generation: int
    reschedule: bool = True


@dataclass(frozen=True, kw_only=True)
class Release:
    """Stop what runs in `slot`, if it is still that generation."""

    slot: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Shutdown:
    """Finish the step under way and end the stream."""


@dataclass(frozen=True, kw_only=True)
class Advance:
    """Launch the next step: from the lead of several processes to its followers."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Load weights beside those that are in use, and say in the heartbeat how that went.

    Attributes:
      number: of the update; later ones have larger numbers.
      path: a file or a directory, as `WorkerConfig.weights`.
    """

    number: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Commit:
    """Use the weights that update `number` prepared: from the next step on, as `version`."""

    number: int
    version: int


@dataclass(frozen=True, kw_only=True)
class Discard:
    """Forget the weights that update `number` prepared."""

    number: int


Command = Admit | Evict | Release | Shutdown | Advance | Prepare | Commit | Discard
_PLAIN: dict[str, Any] = {
    kind.__name__.lower(): kind
    for kind in (Evict, Release, Shutdown, Advance, Prepare, Commit, Discard)
}
_PARAMS = tuple(field.name for field in fields(SamplingParams))


def to_bytes(command: Command) -> bytes:
    """One msgpack array; NumPy integers are written as numbers."""
    if isinstance(command, Admit):
        request = command.request
        params = [getattr(request.params, name) for name in _PARAMS]
        values: list[Any] = [
            "admit",
            command.slot,
            command.generation,
            request.id,
            request.packed_prompt,
            packed_ids(command.draft_token_ids),
            params,
            request.num_emitted,
        ]
    else:
        values = [type(command).__name__.lower(), *vars(command).values()]
    made: bytes = msgpack.packb(values, default=operator.index, unicode_errors="surrogatepass")
    return made


def from_bytes(data: bytes) -> Command:
    """The command that `to_bytes` wrote.

    Raises:
      ControlError: the bytes are not one whole command.
    """
    try:
        return _command(msgpack.unpackb(data, unicode_errors="surrogatepass"))
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise ControlError(f"not a command: {data[:200]!r} ({error!r})") from error


def to_line(start: Start) -> str:
    """A line of JSON, with its newline."""
    return json.dumps(asdict(start), default=operator.index) + "\n"


def from_line(line: str | bytes) -> Start:
    """The start that `to_line` wrote.

    Raises:
      ControlError: the line is no whole `Start`.
    """
    try:
        values = json.loads(line)
        values["config"] = _config(**values["config"])
        values["local_devices"] = tuple(values.get("local_devices", ()))
        kinds = (("control", Connection), ("member", Member), ("resumes", _serves))
        for name, kind in kinds:
            if values.get(name) is not None:
                values[name] = kind(**values[name])
        return Start(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ControlError(f"not a start: {line[:200]!r} ({error!r})") from error


def _config(*, serves: dict[str, Any], **others: Any) -> WorkerConfig:
    return WorkerConfig(**others, serves=_serves(**serves))


def _serves(*, max_logprobs_mode: int, **others: Any) -> Serves:
    return Serves(**others, max_logprobs_mode=LogprobsMode(max_logprobs_mode))


def _command(values: Any) -> Command:
    name, *rest = values
    if name == "admit":
        slot, generation, id, prompt, drafts, params, num_emitted = rest
        return Admit(
            slot=operator.index(slot),
            generation=operator.index(generation),
            request=Request.from_packed(id, prompt, _params(params), num_emitted),
            draft_token_ids=unpacked_ids(drafts),
        )
    kind = _PLAIN[name]
    field_values: dict[str, Any] = {}
    for field, value in zip(fields(kind), rest, strict=True):
        if field.type is str and not isinstance(value, str):
            raise TypeError(f"{value!r} is no {field.name}")
        field_values[field.name] = value if field.type is str else operator.index(value)
    made: Command = kind(**field_values)
    return made


def _params(values: list[Any]) -> SamplingParams:
    named = dict(zip(_PARAMS, values, strict=True))
    return SamplingParams(**named | {"logprobs_mode": LogprobsMode(named["logprobs_mode"])})
