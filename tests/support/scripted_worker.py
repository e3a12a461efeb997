"""A worker without a model or a process, for tests of the engine: its tokens are predictable.

The next token is a function of the whole sequence so far, as in greedy decoding; how many tokens a
step emits is drawn. Like the real worker, it launches a step before it publishes the one before.
"""

import math
import random
import zlib
from types import SimpleNamespace

import numpy as np

from ipc import RingCounters
from ipc.errors import PeerDied
from ipc.wire import Kind, SlotState
from jax_specdec.control import Admit, Commit, Evict, Heartbeat, Phase, Prepare, Release
from jax_specdec.engine.devices import Share
from jax_specdec.engine.errors import WorkerFailed
from jax_specdec.kept_sets import KeptSets
from jax_specdec.records.encode import SlotContents, encode

VOCAB = 32


def next_token(ids):
    return zlib.crc32(repr(ids).encode()) % VOCAB


def logprob(ids):
    """The logprob of the token after `ids`; a multiple of 1/64, so that sums are exact."""
    return -(zlib.crc32(repr(ids).encode() + b"p") % 512) / 64


def continuation(request):
    """All tokens of a request and their logprobs, as if it ran alone and undisturbed."""
    ids, tokens, logprobs = list(request.prompt_token_ids), [], []
    while len(tokens) < request.params.max_tokens:
        logprobs.append(logprob(ids))
        tokens.append(next_token(ids))
        ids.append(tokens[-1])
        if tokens[-1] in request.params.stop_token_ids:
            break
    return tokens, logprobs


def rows_of(slot, logprobs, columns, bits=0, chosen=None):
    """Fields of a message's slot: a row for each of these logprobs, whose other columns are -9.

    Its values of rows, those of `bits`, are minus the logprob.
    """
    n, params = len(logprobs), slot.params
    values = bits.bit_count()
    chosen = (len(params.extra_token_ids) if chosen is None else chosen) if columns else 0
    return {
        "generation": slot.generation,
        "mode": params.logprobs_mode,
        "columns": columns,
        "num_chosen": chosen,
        "values": bits,
        "logprobs": [
            [p] + [-9.0] * (columns - 1 + chosen) + [-p] * values for p in logprobs if columns
        ],
        "token_ranks": [1] * n if columns else (),
        "topk_ids": [[0] * (columns - 1)] * n if columns else (),
    }


def kept_among(tokens):
    """Kept sets of two ids each: the token and the next one, which have half of the share."""
    ids = [one for token in tokens for one in sorted({token, (token + 1) % VOCAB})]
    shares = np.float32([math.log(0.5)] * len(tokens))
    return KeptSets.of(np.int32([2] * len(tokens)), shares, np.int32(ids))


class ScriptedWorker:
    """A worker that is its own ring: it makes a step whenever the engine asks for a message.

    Attributes:
      commands: all commands that it got.
      dies_after: the number of messages after which it is killed; None for never.
      taken: commands that it says it has taken; None: all.
      refusal: why it refuses other weights; empty: it takes them. None: it never answers.
      weights_version: what its messages carry.
    """

    pid = 0
    next_token = staticmethod(next_token)
    name = property(lambda self: f"scripted-{id(self)}")
    ring = property(lambda self: self)

    def __init__(self, num_slots, *, process_rank=0, prefill_only=False, seed=0, dies_after=None,
                 max_drafts=3, draft_messages=False):  # fmt: skip
        self.rng = random.Random(seed)
        self.process_rank, self.prefill_only = process_rank, prefill_only
        self.max_drafts, self.draft_messages = max_drafts, draft_messages
        self.dies_after = dies_after
        self.commands, self.new_commands = [], []
        self.slots = [None] * num_slots  # of SimpleNamespace
        self.step = 0
        self.launched = []  # messages of the step under way
        self.owes_a_step = False  # the last one lacks its draft message
        self.outbox = []
        self.sent = 0
        self.stopped = False
        self.taken = None
        self.beats = 0
        self.refusal, self.answered, self.weights_version = "", 0, 0

    def tell(self, command):
        self.commands.append(command)
        self.new_commands.append(command)
        return len(self.commands)

    def told(self, kind):
        """The commands of a kind that it got."""
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def heartbeat(self):
        """A heartbeat whenever it is asked; its progress are its messages."""
        self.beats += 1
        taken = len(self.commands) if self.taken is None else self.taken
        phase = Phase.STEPPING if any(self.slots) else Phase.IDLE
        return Heartbeat(
            beats=self.beats,
            taken=taken,
            ready=True,
            progress=self.sent,
            phase=phase,
            answered=self.answered,
            refusal=self.refusal or "",
            weights_version=self.weights_version,
        )

    ended = True
    exit_status = None
    share = Share()

    def end(self, cause):
        self.stopped = True

    def failure(self, cause, *, idle=False):
        self.stopped = True
        return WorkerFailed(f"rank {self.process_rank}: {cause}")

    def stop(self, *, drain):
        del drain
        self.stopped = True
        return 0

    def counters(self):
        rest = dict.fromkeys(("payload_bytes", "depth", "waits", "wait_ns"), 0)
        return RingCounters(messages=self.sent, capacity=1, **rest)

    def ready(self):
        waiting = self.outbox or self.launched or self.new_commands
        return bool(waiting or any(self.slots) or self.owes_a_step or self.sent == self.dies_after)

    def receive(self, timeout):
        message = self.try_receive()
        assert message is not None, "the engine would wait without end"
        return message

    def try_receive(self):
        assert not self.stopped, "a worker that is gone was asked for a message"
        if self.dies_after is not None and self.sent >= self.dies_after:
            raise PeerDied("producer", self.pid, self.sent - 1)
        while not self.outbox and self.ready():
            self.advance()
        if not self.outbox:
            return None
        self.sent += 1
        data = self.outbox.pop(0)
        return SimpleNamespace(data=data, send_time_ns=0, receive_time_ns=1)

    def advance(self):
        """Take the commands, launch a step, publish the one before."""
        for command in self.new_commands:
            self.apply(command)
        self.new_commands.clear()
        following = self.launch() if any(self.slots) or self.owes_a_step else []
        self.outbox += self.launched
        self.launched = following

    def apply(self, command):
        if isinstance(command, Admit):
            assert self.slots[command.slot] is None or self.slots[command.slot].ended
            self.slots[command.slot] = SimpleNamespace(
                generation=command.generation,
                params=command.request.params,
                prompt=list(command.request.prompt_token_ids),
                ids=list(command.request.prompt_token_ids),
                left=command.request.params.max_tokens,
                drafts=list(command.draft_token_ids),
                wait=self.rng.randint(0, 2),  # steps in which the prompt is still prefilled
                # The next prompt token that gets logprobs, where they were asked.
                scored=max(command.request.params.prompt_logprobs_start, 1),
                evicted=None,
                ended=False,
            )
        elif isinstance(command, Prepare) and self.refusal is not None:
            self.answered = command.number
        elif isinstance(command, Commit):
            assert (command.number, self.refusal) == (self.answered, "")
            self.weights_version = command.version
        elif isinstance(command, Evict | Release):
            slot = self.slots[command.slot]
            if slot is not None and slot.generation == command.generation and not slot.ended:
                if isinstance(command, Evict):
                    slot.evicted = command
                else:
                    self.slots[command.slot] = None

    def launch(self):
        messages, contents, drafts = [], [], []
        for index, slot in enumerate(self.slots):
            if slot is None:
                contents.append(SlotContents(state=SlotState.STOPPED))
                drafts.append(SlotContents(state=SlotState.STOPPED))
                continue
            if slot.params.prompt_logprobs is not None:
                messages += self.score(index, slot)
            target, verified = self.slot_step(slot)
            contents.append(target)
            n = len(verified)
            rows = rows_of(slot, [-9.0] * n, slot.params.num_columns)
            drafts.append(SlotContents(token_ids=verified, num_drafts=n, **rows))
            if slot.ended:
                self.slots[index] = None
        follows = self.draft_messages and self.rng.random() < 0.7
        header = self.header
        messages.append(encode(Kind.TARGET, self.step, contents, draft_follows=follows, **header))
        # A draft message that does not come costs only the drafts, as long as a step follows: it
        # does, even where every slot is released before.
        self.owes_a_step = follows and any(self.slots) and self.rng.random() < 0.2
        if follows and not self.owes_a_step:
            messages.append(encode(Kind.DRAFT, self.step, drafts, **header))
        self.step += 1
        return messages

    @property
    def header(self):
        return {"process_rank": self.process_rank, "weights_version": self.weights_version}

    def score(self, index, slot):
        """The message of the next chunk of a prompt's logprobs; all chunks come before a token."""
        prompt = slot.prompt
        left = len(prompt) - slot.scored
        if slot.evicted is not None or left <= 0:
            return []
        n = self.rng.randint(1, left)
        slot.wait = max(slot.wait, int(n < left))
        places = range(slot.scored, slot.scored + n)
        logprobs = [logprob(prompt[:place]) for place in places]
        named = slot.params.num_prompt_chosen
        rows = rows_of(slot, logprobs, slot.params.prompt_logprobs + 1, chosen=named)
        said = [SlotContents(state=SlotState.NOTHING)] * len(self.slots)
        said[index] = SlotContents(token_ids=prompt[slot.scored : slot.scored + n], **rows)
        slot.scored += n
        return [encode(Kind.PROMPT, self.step, said, **self.header)]

    def slot_step(self, slot):
        """The slot's contents in this step, and the drafts that it verified."""
        generation = slot.generation
        if slot.evicted is not None:
            slot.ended = True
            state = SlotState.PREEMPTED if slot.evicted.reschedule else SlotState.RECOVERY_STOP
            return SlotContents(state=state, generation=generation), []
        if slot.wait:
            slot.wait -= 1
            return SlotContents(state=SlotState.NOTHING, generation=generation), []
        drafts, tokens, logprobs = slot.drafts, [], []
        for place in range(min(len(drafts) + 1, slot.left)):  # greedy verification
            logprobs.append(logprob(slot.ids))
            tokens.append(self.next_token(slot.ids))
            slot.ids.append(tokens[-1])
            if tokens[-1:] != drafts[place : place + 1]:
                break
        slot.left -= len(tokens)
        slot.ended = slot.left == 0 or bool(set(tokens) & set(slot.params.stop_token_ids))
        slot.drafts = self.propose(slot)
        state, extra = SlotState.TOKENS, []
        if self.prefill_only:
            state, extra, drafts = SlotState.PREFILL_FIRST_TOKEN, slot.drafts, []
            slot.ended = True
        contents = SlotContents(
            state=state,
            token_ids=tokens + extra,
            num_drafts=len(drafts) + len(extra),
            kept=kept_among(tokens) if slot.params.kept_token_ids else None,
            **rows_of(slot, logprobs, slot.params.num_columns, slot.params.row_values),
        )
        return contents, drafts

    def propose(self, slot):
        """Drafts for the next step, right ones up to a random place."""
        num = min(self.rng.randint(0, self.max_drafts), max(slot.left - 1, 0))
        right, ids, drafts = self.rng.randint(0, num), list(slot.ids), []
        for place in range(num):
            token = self.next_token(ids)
            drafts.append(token if place < right else (token + 1) % VOCAB)
            ids.append(drafts[-1])
        return drafts
