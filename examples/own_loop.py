"""A decoding loop of your own, in one process, and its records, in another that never loads jax.

    python examples/own_loop.py

This is the reading side: it starts `own_loop_worker.py`, which runs a model of its own, and prints
the text of three requests that are decoded together, with what each of them asked for.
"""

import subprocess
import sys
from pathlib import Path

import story

from ipc import RingReader
from jax_specdec.engine import FinishReason, control, decode
from jax_specdec.engine import output_processor as processor

WORKER = Path(__file__).parent / "own_loop_worker.py"


def start_worker(reader, requests):
    """Start the worker: it attaches to the ring by name and reads the requests from its stdin."""
    worker = subprocess.Popen([sys.executable, WORKER, reader.name], stdin=subprocess.PIPE)
    reader.expect_peer(worker.pid)  # its death is noticed even before it has attached
    for slot, request in enumerate(requests):
        admit = control.Admit(slot=slot, generation=1, request=request)
        worker.stdin.write(control.to_bytes(admit).hex().encode() + b"\n")
    worker.stdin.close()
    return worker


def admit_all(requests):
    """Make a processor state with request b in slot b, where the worker has it."""
    state = processor.ProcessorState.empty(num_slots=len(requests))
    for slot, request in enumerate(requests):
        state = processor.admit(state, slot=slot, generation=1, request=request)
    return state


def show(record) -> None:
    """Print a record of the first steps, with its rows where the request asked for a top K."""
    if record.step > 2:
        return
    text = story.decode(record.token_ids)
    total = record.cumulative_logprob
    said = "no logprobs asked" if total is None else f"logprob so far {total:7.3f}"
    print(
        f"step {record.step}  {record.request_id:8}  {text!r:8}"
        f"  {record.num_accepted} of {record.num_drafts} drafts  {said}"
    )
    if record.topk_ids is None or not record.topk_ids.size:
        return
    for n, row in enumerate(record.logprobs):
        best = zip(story.decode(record.topk_ids[n]), row[1:], strict=True)
        others = ", ".join(f"{character!r} {logprob:.3f}" for character, logprob in best)
        print(f"         {text[n]!r} {row[0]:.3f}, rank {record.token_ranks[n]}; top: {others}")
    drafted = story.decode(record.draft.token_ids)
    print(f"         drafted {drafted!r}, logprobs {record.draft.logprobs[:, 0].round(3)}")


def main() -> None:
    texts = {r.id: story.decode(r.prompt_token_ids) for r in story.REQUESTS}
    reasons = {}
    with RingReader.create(num_slots=16, slot_bytes=1 << 16) as reader:
        worker = start_worker(reader, story.REQUESTS)
        state = admit_all(story.REQUESTS)
        for message in reader:  # up to the end of the stream; PeerDied if the worker dies
            state, records = processor.step(state, decode(message.data))
            for record in records:
                texts[record.request_id] += story.decode(record.token_ids)
                show(record)
                if record.finish_reason:
                    reasons[record.request_id] = record.finish_reason.name.lower()
        worker.wait()
    state, late = processor.flush(state, FinishReason.WORKER_LOST)  # empty unless it failed
    reasons |= {r.request_id: r.finish_reason.name.lower() for r in late if r.finish_reason}
    print()
    for name, text in texts.items():
        print(f"{name:8}  {text}  ({reasons[name]})")
    if worker.returncode:
        sys.exit(f"the worker failed: exit status {worker.returncode}")
    print(f"accepted {state.statistics.acceptance_rate:.0%} of the drafts")


if __name__ == "__main__":
    main()
