"""The model worker: it keeps the slots decoding and publishes each step's messages.

It launches step n + 1 before it reads step n, so the device never waits for the host: while the
device computes, the host takes commands, waits for the copy of the last step's words and sends
them. Everything that step n + 1 needs from step n stays on the device.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Protocol

import jax
import numpy as np
from jax.stages import Compiled as Stage

from ipc import wire
from ipc.wire import SlotState
from jax_specdec import control
from jax_specdec.declaration import Serves
from jax_specdec.device.loop import host_slots
from jax_specdec.device.loop.host_slots import AllOptions, Slot
from jax_specdec.device.loop.kinds import Ladder, PromptKind, StepKind, empty_report
from jax_specdec.device.loop.programs import Compiled, cuts_messages
from jax_specdec.device.loop.state import LoopConfig, LoopState, init_state, with_report
from jax_specdec.device.loop.step import StepRows
from jax_specdec.device.messages.batch_options import Widths
from jax_specdec.device.messages.logit_changes import GrammarMasks
from jax_specdec.device.messages.step_messages import StepOutput
from jax_specdec.device.model.layer_arrays import with_array_a_layer
from jax_specdec.device.model.params import ModelParams
from jax_specdec.device.model.sharding import params_specs
from jax_specdec.device.worker.grammars import Grammars, no_masks
from jax_specdec.device.worker.kept_kinds import AnyKind, Executable
from jax_specdec.device.worker.next_weights import NextWeights
from jax_specdec.device.worker.outgoing import Outgoing, check
from jax_specdec.device.worker.prefix_cache import PrefixCache
from jax_specdec.device.worker.step_widths import LEAST_CHANGES, StepWidths
from jax_specdec.requests import Request, SamplingParams
from jax_specdec.structured.vocabulary import Vocabulary


class Sender(Protocol):
    """Takes messages: the ring, or a list in a test."""

    def send(self, data: np.ndarray, /) -> object:
        """Send the words of one message."""
        ...


@dataclass(frozen=True)
class Launched:
    """A step that is under way, or prompts alone."""

    generations: list[int]  # of the slots when it was launched
    prompts: tuple[jax.Array, ...]  # their messages, which go first
    words: tuple[jax.Array, ...] = ()  # the step's target and draft message; none without a step
    kind: StepKind | None = None  # of the step
    fates: jax.Array | None = None  # of its drafts, [B]; None where its width is fixed
    at: float | None = None  # when it was, by `time.perf_counter`; None behind other programs


class Worker:
    """Slots, the device state, and at most one step that is launched but not yet published."""

    def __init__(
        self,
        config: LoopConfig,
        params: Any,
        sender: Sender,
        *,
        prefill_chunk: int = control.WorkerConfig.prefill_chunk,
        prefix_reuse: bool = control.WorkerConfig.prefix_reuse,
        process_rank: int = 0,
        publish: bool = True,
        compiled: Compiled | None = None,
        serves: Serves | None = None,
        weights_version: int = 0,
        load: Callable[[str, Any], Any] | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
        adaptive: bool = False,
        wake: Callable[[], object] | None = None,
        note: Callable[[str], object] = lambda text: None,
    ) -> None:
        """Start with empty slots.

        Args:
          config: the loop.
          params: the model's weights; of a model of your own, what its functions take.
          sender: takes the messages.
          prefill_chunk: prompt tokens that run between two steps.
          prefix_reuse: run what prompts have in common once, where it is still in a slot's caches;
            no value depends on it. A prompt is run from the first token on whose logprobs are
            wanted.
          process_rank: the number in the messages.
          publish: send messages. A process that sends none makes and reads them all the same, as
            the programs that make them have collectives, and clears the same slots.
          compiled: the loop's programs, where workers of one configuration share them.
          serves: what requests may ask for: batches run the programs of its ladder, which `kinds`
            names. None: each batch has the cheapest programs that serve it, compiled when they are
            first needed.
          weights_version: the number of `params`, which messages carry.
          load: reads other weights for the commands `Prepare`: of a path, and the weights in use;
            an error of its refuses them. None: there are no others.
          vocabulary: reads the bytes of the model's tokens, which grammars need. None: a request
            with one ends with an error.
          adaptive: each step verifies as many drafts as pay, as `StepWidths` says; else all D.
          wake: called in another thread when a grammar was compiled: then `advance` goes on with
            its request. None: everything waits until it is compiled.
          note: takes lines for the engine's log: why a text has ended.
        """
        self.config = config
        self.params = self.placed(params)
        self.weights_version = weights_version
        self.next_weights = NextWeights(load, self.placed)
        self.sender = sender
        self.prefill_chunk = prefill_chunk
        self.publish = publish
        self.compiled = compiled or Compiled(config, cuts=cuts_messages(config))
        self.state = init_state(config)
        draws = self.state.drafts.q is not None
        self.outgoing = Outgoing(process_rank, config.digest, draws and not config.prefill_only)
        self.slots = [Slot() for _ in range(config.num_slots)]
        self.prefix_reuse = prefix_reuse
        self.prefixes = PrefixCache(config.num_slots, prefill_chunk)
        self.kind = StepKind()  # whose programs the last step ran
        self.options: AllOptions | None = None  # by the slots; None once they changed
        self.step_number = 0  # of the next step; published steps have consecutive numbers
        self.launched: Launched | None = None
        self._alone = True  # no program has run since the last step
        self.step_widths: StepWidths | None = None
        if adaptive and config.drafter.num_drafts and not config.prefill_only:
            self.step_widths = StepWidths(config.drafter.num_drafts, certain=not draws)
        self._done_at = 0.0  # when the last step was on the host
        self._note = note
        self._names: dict[int, str] = {}  # ids of requests, by slot
        self.grammars = Grammars(config, vocabulary, at_once=wake is None, wake=wake)
        self._no_masks: GrammarMasks | None = None  # on the device, once a batch has needed them
        self.serves = serves
        self.ladder: Ladder | None = None
        self._ahead: dict[AnyKind, Any] = {}  # as `compiled`, of executables
        # Those whose programs are compiled beside the steps; others are there.
        self.coming: Mapping[StepKind | PromptKind, Future[None]] = {}
        if serves is not None:
            self.ladder = Ladder.of(serves, config, prefill_chunk, draws=self.outgoing.sends_drafts)

    @property
    def busy(self) -> bool:
        """Whether anything is left to launch, to publish or to decide."""
        return self.launched is not None or any(
            s.verdict or (s.occupied and not self._awaits_grammar(s)) for s in self.slots
        )

    @property
    def num_held(self) -> int:
        """Requests that wait for a grammar, which is compiled."""
        return sum(map(self._awaits_grammar, self.slots))

    def _awaits_grammar(self, slot: Slot) -> bool:
        """Whether a request's grammar is compiled; `wake` says when that is done."""
        waits = slot.occupied and slot.prefill_at is not None
        return waits and slot.grammar is not None and not slot.grammar.done()

    def apply(self, command: control.Command) -> bool:
        """Carry out one command between two steps; False after the last one.

        A `Release` or an `Evict` of a request that has ended here changes nothing: its last tokens
        have been published or are on their way. Processes that share a model and carry out the
        same commands, `Advance` among them, run the same programs in the same order.

        Raises:
          ValueError: a slot is given away before its eviction was published, a request asks for
            more than is served, a draft that was handed over is no token, or weights are committed
            that were not prepared.
        """
        if isinstance(command, control.Admit):
            self._admit(command)
        elif isinstance(command, control.Release):
            self._take_back(command.slot, command.generation, verdict=0)
        elif isinstance(command, control.Evict):
            if self.slots[command.slot].occupied:
                verdict = SlotState.PREEMPTED if command.reschedule else SlotState.RECOVERY_STOP
                self._take_back(command.slot, command.generation, verdict)
        elif isinstance(command, control.Advance):
            self.advance()
        elif isinstance(command, control.Prepare):
            self.next_weights.prepare(command.number, command.path, self.params)
        elif isinstance(command, control.Commit):
            self._commit(command)
        elif isinstance(command, control.Discard):
            self.next_weights.discard(command.number)
        elif isinstance(command, control.Shutdown):
            self.finish()
            return False
        return True

    def advance(self) -> None:
        """Launch the next step, then publish the one before it."""
        prompts = [
            words
            for index, slot in enumerate(self.slots)
            if slot.occupied and slot.prefill_at is not None and self._may_begin(index, slot)
            for words in self._prefill(index, slot)
        ]
        # An eviction is reported even where no slot decodes.
        due = any(slot.decoding or slot.verdict for slot in self.slots)
        following = None
        if due or prompts:
            generations = [slot.generation for slot in self.slots]
            step = self._launch() if due else ()
            following = Launched(generations, tuple(prompts), *step)
        self.finish()
        self.launched = following

    def finish(self) -> None:
        """Publish the step that is under way, and launch no other."""
        if self.launched is not None:
            self._publish(self.launched)
        self.launched = None

    def kinds(self, *, narrower: bool = True) -> tuple[StepKind, ...]:
        """All kinds of steps that batches may run, or those of the full width."""
        assert self.ladder is not None, "without `serves`, there is no telling"
        rungs, kinds = self.ladder.rungs, [*self.ladder.rungs]
        if narrower and self.step_widths is not None:
            num_drafts = self.config.drafter.num_drafts
            kinds += [kind for rung in rungs for kind in rung.narrower(num_drafts)]
        return tuple(kinds)

    def kinds_for(self, serves: Serves) -> tuple[StepKind | PromptKind, ...]:
        """The kinds that requests run which ask for no more than this, at the full width."""
        assert self.ladder is not None, "without `serves`, there is no telling"
        draws = self.outgoing.sends_drafts
        least = Ladder.of(serves, self.config, self.prefill_chunk, draws=draws)
        kinds: list[StepKind | PromptKind] = [*dict.fromkeys(map(self.ladder.lowest, least.rungs))]
        if least.prompt is not None and self.ladder.prompt is not None:
            kinds.append(self.ladder.prompt)
        return tuple(kinds)

    def rehearse(
        self, kinds: Sequence[StepKind], tell: Callable[[str], object] = lambda name: None
    ) -> None:
        """Run each program once, while all slots are empty.

        The first call of a program takes longer than all others, be it compiled or not. Nothing is
        sent.

        Args:
          kinds: of steps.
          tell: called with the name of what runs next.
        """
        grammars = None
        if any(kind.has_grammar for kind in kinds):
            grammars = self.grammars.prepare()
        tell("prompts")
        self._rehearse_prompts()
        outputs: dict[StepKind, StepOutput] = {}  # of steps, whose programs kinds share
        for kind in kinds:
            tell(str(kind))
            options = host_slots.all_options(self.slots, kind.widths, kind.changes)
            step = kind._replace(widths=kind.widths if kind.reports_drafts else Widths())
            if step not in outputs:
                self.kind, self.options = kind, options
                outputs[step] = self.run_kind(kind)
            self.outgoing.rehearse(
                self.programs(kind), outputs[step], self.slots, kind, options.options
            )
        if grammars is not None:
            tell("grammars")
            grammars.exception()  # waits
        self._time_widths()
        self.options, self.kind, self._alone = None, StepKind(), True

    def _time_widths(self) -> None:
        """Learn what drafts cost a step of the first rung; others begin with that."""
        if self.step_widths is None or self.ladder is None:
            return
        rung = self.ladder.rungs[0]
        kinds = [*self.narrower(rung), rung]
        self.step_widths.begin(kinds)
        self.kind = rung
        self.options = host_slots.all_options(self.slots, rung.widths, rung.changes)
        for kind in kinds * -(-(LEAST_CHANGES + 1) // len(kinds)):
            began = time.perf_counter()
            jax.block_until_ready(self.run_kind(kind))
            self.step_widths.took(kind, time.perf_counter() - began)
        self.step_widths.took(rung, None)  # no step follows it at once

    def _rehearse_prompts(self) -> None:
        index, request = np.int32(0), Request(id="", prompt_token_ids=(0, 0))
        sizes = self.config.max_length, self.config.drafter.num_drafts
        self._change(self.programs().admit, index, host_slots.admission(request, *sizes))
        chunk = self.prefill_chunk
        run = functools.partial(self.programs().prefill_chunk, self.params, chunk=chunk)
        self._change(run, index, index)
        if self.ladder is not None and self.ladder.prompt is not None:
            params = SamplingParams(prompt_logprobs=0)
            slot = Slot(params=params, prefill_at=0, prefill_length=2, score_from=0)
            for words in self._score(slot, (index, index)):
                np.asarray(words)
        self._change(self.programs().copy_prefix, index, index)
        self._change(self.programs().start_again)
        self._change(self.programs().release, index)

    def _admit(self, command: control.Admit) -> None:
        request, vocab = command.request, self.config.model.vocab_size
        if self.slots[command.slot].verdict:
            raise ValueError(
                f"slot {command.slot} was evicted and no message has said so yet: "
                "admit a request after that message, or release the slot first"
            )
        if self.serves is not None and (excess := self.serves.excess(request.params)) is not None:
            raise ValueError(f"request {request.id!r} {excess}")
        if wrong := [i for i in command.draft_token_ids if not 0 <= i < vocab]:
            raise ValueError(
                f"request {request.id!r}: draft token id {wrong[0]} is outside the vocabulary "
                f"(0 to {vocab - 1})"
            )
        self._change(
            self.programs().admit,
            np.int32(command.slot),
            host_slots.admission(
                request,
                self.config.max_length,
                self.config.drafter.num_drafts,
                command.draft_token_ids,
            ),
        )
        score_from = None if request.first_scored is None else request.first_scored - 1
        prompt = self._reusable(request.prompt_token_ids, score_from)
        slot = Slot(
            generation=command.generation,
            params=request.params,
            most_tokens=host_slots.most_drafts(request, self.config.drafter.num_drafts) + 1,
            prefill_at=self.prefixes.admit(command.slot, prompt),
            prefill_length=len(request.prompt_token_ids),
            prompt_length=len(request.prompt_token_ids),
            num_emitted=request.num_emitted,
            score_from=score_from,
            grammar=self.grammars.begin(request),
        )
        self._names[command.slot] = request.id
        self._set(command.slot, slot)

    def _reusable(self, token_ids: Sequence[int], score_from: int | None) -> Sequence[int]:
        """The leading tokens of a prompt whose caches may be those of another slot.

        Every row of its logprobs needs its hidden state, which is in no cache.
        """
        if not self.prefix_reuse:
            return ()
        # A chunk that may be taken over is followed by a position that is run, and its token.
        return token_ids if score_from is None else token_ids[: score_from + 2]

    def kind_of(self, slots: Sequence[Slot]) -> StepKind:
        """The cheapest kind of programs that serves these slots."""
        draws = self.outgoing.sends_drafts
        exact = StepKind.of_slots(slots, self.config.model.vocab_size, draws=draws)
        return exact if self.ladder is None else self.ladder.lowest(exact)

    def narrower(self, kind: StepKind) -> tuple[StepKind, ...]:
        """The kinds of steps that verify fewer drafts, whose programs are there.

        There are none for a batch with a grammar: its masks follow all drafts.
        """
        if self.step_widths is None or any(slot.grammar is not None for slot in self.slots):
            return ()
        narrower = kind.narrower(self.config.drafter.num_drafts)
        return tuple(
            kind_of_width
            for kind_of_width in narrower
            if (coming := self.coming.get(kind_of_width)) is None
            or (coming.done() and coming.exception() is None)
        )

    def run_ahead(self, ahead: Mapping[AnyKind, Mapping[str, Stage]]) -> None:
        """Run these programs from now on, where their kinds are run: they need not be traced."""
        functions = vars(self.compiled)
        for kind, stages in ahead.items():
            executables = {name: Executable(stage) for name, stage in stages.items()}
            self._ahead[kind] = SimpleNamespace(**functions | executables)

    def programs(self, kind: AnyKind = None) -> Any:
        """The programs of a kind, as `Compiled` has them; None: those that all kinds share."""
        return self._ahead.get(kind, self.compiled)

    def await_programs(self, kind: StepKind | PromptKind) -> None:
        """Wait until the programs of a kind are there, where they are compiled beside the steps.

        Raises:
          CannotCompile: they cannot be.
        """
        if kind in self.coming:
            self.coming[kind].result()

    def prompt_kind_of(self, slot: Slot) -> PromptKind:
        """The kind of programs for the prompt of a slot that wants its logprobs."""
        if self.ladder is None or self.ladder.prompt is None:
            return PromptKind.of_slot(slot, self.config, self.prefill_chunk)
        return self.ladder.prompt

    def _commit(self, command: control.Commit) -> None:
        """Use other weights from the next step on; what runs runs its tokens again.

        Nothing is compiled for them: they have the shapes, types and places of those before.
        """
        params = self.next_weights.take(command.number)
        self.finish()  # of the step under way, with the weights that made it
        self.params, self.weights_version = params, command.version
        state = self.state
        runs = np.asarray(state.active) | np.asarray(state.prefilling)
        tokens, lengths = np.asarray(state.tokens), np.asarray(state.lengths)
        self._change(self.programs().start_again)
        reused, self.prefixes = self.prefixes.reused, PrefixCache(len(runs), self.prefill_chunk)
        self.prefixes.reused = reused
        for index, slot in enumerate(self.slots):
            if not (slot.occupied and runs[index]):  # one that ended says so in the next step
                continue
            # Rows of a prompt are sent once: those that were keep the old version.
            score_from = None
            if slot.score_from is not None and slot.prefill_at is not None:
                score_from = max(slot.score_from, slot.prefill_at)
            token_ids = tokens[index, : lengths[index]].tolist()
            again = replace(
                slot,
                prefill_at=self.prefixes.admit(index, self._reusable(token_ids, score_from)),
                prefill_length=int(lengths[index]),
                score_from=score_from,
            )
            self._set(index, again)

    def placed(self, params: Any) -> Any:
        """The weights on the devices that share them, as steps take them."""
        parallel = self.config.parallel
        if parallel.mesh is None:
            is_on_cpu = jax.default_backend() == "cpu" and isinstance(params, ModelParams)
            return with_array_a_layer(params) if is_on_cpu else params
        return parallel.place(params, params_specs(params, parallel.num_shards))

    def _take_back(self, index: int, generation: int, verdict: int) -> None:
        """Free a slot if it is still of this generation; the next message tells the verdict."""
        slot = self.slots[index]
        if slot.generation == generation and (slot.occupied or slot.verdict):
            self._change(self.programs().release, np.int32(index))
            self._set(index, Slot(generation=generation, verdict=verdict))

    def _change(self, program: Callable[..., LoopState], *arguments: Any) -> None:
        """Run a program on the state that only passes on the report on drafts."""
        self._alone = False
        report = self.state.drafts.report
        self.state = with_report(program(with_report(self.state, None), *arguments), report)

    def _set(self, index: int, slot: Slot) -> None:
        self.slots[index] = slot
        self.options = None

    def _may_begin(self, index: int, slot: Slot) -> bool:
        """Whether a slot's grammar is there: others go on while it is compiled.

        A request whose grammar cannot be served ends.
        """
        if slot.grammar is None:
            return True
        if not slot.grammar.done():
            return False
        error = slot.grammar.exception()
        if error is not None:
            self._end_text(index, error)
        return error is None

    def _end_text(self, index: int, error: BaseException) -> None:
        """End the request of a slot whose grammar does not go on."""
        text = f"request {self._names.get(index, '')!r} (slot {index}) ends: {error}"
        say(text)
        self._note(text)
        self._take_back(index, self.slots[index].generation, SlotState.RECOVERY_STOP)

    def _prefill(self, index: int, slot: Slot) -> tuple[jax.Array, ...]:
        """Run one chunk of a prompt: a long prompt does not hold up the other slots' tokens.

        Returns the words of the chunk's own message, where its logprobs are wanted.
        """
        start = self._reuse(index, slot.prefill_at or 0)
        slot.prefill_at, chunk = start, self.prefill_chunk
        places = np.int32(index), np.int32(start)
        words: tuple[jax.Array, ...] = ()
        if slot.score_from is None or slot.next_unscored >= chunk:
            run = functools.partial(self.programs().prefill_chunk, self.params, chunk=chunk)
            self._change(run, *places)
            self.prefixes.hold(index, start + chunk)
        else:
            kind = self.prompt_kind_of(slot)
            self.await_programs(kind)
            chunk, words = kind.chunk, self._score(slot, places)
        following = start + chunk
        slot.prefill_at = following if following < slot.prefill_length - 1 else None
        return words

    def _reuse(self, index: int, start: int) -> int:
        """Take over what another slot holds of a prompt by now; returns where to go on.

        Every chunk asks: equal prompts that came together each run other chunks. What the source is
        doing meanwhile does not matter: a copy takes the state that the last program leaves, and no
        step writes where a prompt was run.
        """
        source, held = self.prefixes.longest(index)
        if held <= start:
            return start
        self._change(self.programs().copy_prefix, np.int32(source), np.int32(index))
        self.prefixes.hold(index, held, reused=True)
        return held

    def _score(self, slot: Slot, places: tuple[np.int32, np.int32]) -> tuple[jax.Array, ...]:
        """Run one chunk of a prompt and its logprobs; the words of its message, if it has any."""
        kind, scoring = self.prompt_kind_of(slot), host_slots.for_prompt(slot)
        programs, (chunk, widths) = self.programs(kind), kind
        options = host_slots.options_of_slots([scoring], widths)
        self._alone = False
        report = self.state.drafts.report
        unscored = np.int32(min(slot.next_unscored, chunk))
        extra_ids = host_slots.prompt_extra_ids(slot, chunk, widths.chosen)
        state, scored = programs.score_chunk(
            self.params, with_report(self.state, None), *places, unscored, extra_ids, options,
            chunk=chunk, widths=widths,
        )  # fmt: skip
        self.state = with_report(state, report)
        num_tokens = min(chunk, slot.prefill_length - 1 - (slot.prefill_at or 0)) - int(unscored)
        if num_tokens <= 0:
            return ()
        stamp = self.outgoing.stamp(self.step_number, self.weights_version)
        words = self.outgoing.prompt_message(
            programs,
            scored,
            num_tokens,
            stamp,
            places[0],
            scoring,
            self.slots,
            widths,
            options,
        )
        return (words,)

    def _launch(self) -> tuple[tuple[jax.Array, ...], StepKind, jax.Array | None, float | None]:
        """Start a step and the copy of its messages; what the host knows now bounds their size.

        Returns what `Launched` has of a step.
        """
        at = time.perf_counter() if self._alone else None
        self._alone = True
        if self.options is None:
            self.kind = self.kind_of(self.slots)
            self.await_programs(self.kind)
            self.options = host_slots.all_options(self.slots, self.kind.widths, self.kind.changes)
        kind = self.kind
        if self.step_widths is not None:
            kind = self.step_widths.choose(kind, self.slots, self.narrower(kind))
        output = self.run_kind(kind)
        stamp = self.outgoing.stamp(self.step_number, self.weights_version)
        assert self.options is not None
        words = self.outgoing.step_messages(
            self.programs(kind), output, stamp, self.slots, kind.widths, self.options.options
        )
        self.step_number += 1
        # On every process, whether it publishes or not: a verdict or a request that was handed
        # over is told once, and must not be told of the slot's next request.
        for index, slot in enumerate(self.slots):
            if slot.verdict or (self.config.prefill_only and slot.decoding):
                self._set(index, Slot(generation=slot.generation))
        fates = None if self.step_widths is None else output.fates
        if fates is not None:
            fates.copy_to_host_async()
        return words, kind, fates, at

    def run_kind(self, kind: StepKind) -> StepOutput:
        """Run the programs of a step; `options` are those of its kind."""
        rows: tuple[StepRows, ...] = ()
        programs = self.programs(kind)
        step, masks = programs.step, None
        if kind.has_grammar:
            run, masks = self._run_rows(programs)
            step, rows = programs.choose, (run,)
        assert self.options is not None
        options, changes = self.options
        if changes is not None:
            changes = changes._replace(grammar=masks)
        state = self.state if self.ladder is None else self._with_report_of(kind)
        output: StepOutput
        self.state, output = step(
            self.params, state, *rows, options, changes=changes, **kind.step_options
        )
        return output

    def _with_report_of(self, kind: StepKind) -> LoopState:
        """The state with the report on its drafts that a step of this kind takes."""
        drafts = self.state.drafts
        if drafts.report is not None and kind.reports_drafts:
            return self.state  # kinds that report have the same widths
        empty = empty_report(kind, drafts.token_ids.shape)
        place = drafts.token_ids.sharding if drafts.token_ids.committed else None
        return with_report(self.state, jax.device_put(empty, place))

    def _run_rows(self, programs: Any) -> tuple[StepRows, GrammarMasks]:
        """Start a step's forward pass, and make its masks meanwhile.

        They need the tokens and drafts that the step before left: this alone waits for that step,
        and only where a slot has a grammar.
        """
        report, bare = self.state.drafts.report, with_report(self.state, None)
        has_grammar = any(slot.grammar is not None and slot.decoding for slot in self.slots)
        seen = programs.seen(bare) if has_grammar else None
        if seen is not None:
            seen.copy_to_host_async()
        state, rows = programs.forward_rows(self.params, bare)
        self.state = with_report(state, report)
        if seen is None:
            if self._no_masks is None:
                self._no_masks = jax.device_put(no_masks(self.config))
            return rows, self._no_masks
        masks, errors = self.grammars.masks(self.slots, np.asarray(seen))
        for index, error in errors.items():
            self._end_text(index, error)
        if self.options is None:
            self.options = host_slots.all_options(self.slots, self.kind.widths, self.kind.changes)
        return rows, masks

    def _publish(self, launched: Launched) -> None:
        """Send a step's messages once they are on the host; free the slots that have stopped."""
        for words in launched.prompts:
            self._send(self._on_host(words))
        messages = [self._on_host(words) for words in launched.words]
        for message in messages:
            self._send(message)
        if not messages:
            return
        self._learn(launched)
        fields = messages[0][wire.HEADER_WORDS :][: wire.SLOT_WORDS * len(self.slots)]
        states = wire.SLOT["state"].get(fields.reshape(len(self.slots), wire.SLOT_WORDS))
        for index in np.flatnonzero(states == SlotState.STOPPED).tolist():
            generation = launched.generations[index]
            if generation == self.slots[index].generation:  # not of a request that came since
                self._set(index, Slot(generation=generation))

    def _learn(self, launched: Launched) -> None:
        """Take in what a step that is on the host tells of widths."""
        before, self._done_at = self._done_at, time.perf_counter()
        if self.step_widths is None or launched.fates is None or launched.kind is None:
            return
        self.step_widths.saw(launched.generations, np.asarray(launched.fates).tolist())
        begun = None if launched.at is None else max(launched.at, before)
        self.step_widths.took(launched.kind, None if begun is None else self._done_at - begun)

    def _on_host(self, words: jax.Array) -> np.ndarray:
        """A message, once the device has made it."""
        return check(np.asarray(words))

    def _send(self, message: np.ndarray) -> None:
        if self.publish:
            self.sender.send(message)


def say(text: str) -> None:
    """Write to the worker's output, which the engine keeps in a file."""
    print(text, file=sys.stderr, flush=True)
