"""Reading two workers in one asyncio program, while the event loop does other things too.

    python examples/asyncio_engine.py
    python examples/asyncio_engine.py --kill        the second worker dies; the first goes on

Each worker has its own ring and its own state of the output processor. A ring with a doorbell can
be awaited; each request's records go to the coroutine that serves its user, as they come.
"""

import asyncio
import sys

import story
from own_loop import admit_all, start_worker

from ipc import PeerDied, RingReader
from jax_specdec.engine import FinishReason, decode
from jax_specdec.engine import output_processor as processor

SHARES = (story.REQUESTS[:2], story.REQUESTS[2:])  # of the two workers


async def read(reader: RingReader, state, inboxes) -> None:
    """Hand every record of one ring to its request's inbox."""

    def deliver(records) -> None:
        for record in records:
            inboxes[record.request_id].put_nowait(record)

    try:
        async for message in reader:
            state, records = processor.step(state, decode(message.data))
            deliver(records)
    except PeerDied as error:  # this worker's requests end, the other worker's go on
        print(f"a worker is lost: {error}")
    # The records that still waited for their drafts, and an end for requests that have none yet.
    state, records = processor.flush(state, FinishReason.WORKER_LOST)
    deliver(records)


async def serve(request, inbox) -> str:
    """Collect what one user sees: the text as it grows, until the request ends."""
    text, num_records = story.decode(request.prompt_token_ids), 0
    while True:
        record = await inbox.get()
        text += story.decode(record.token_ids)
        num_records += 1
        if record.finish_reason:
            total = record.cumulative_logprob
            logprob = "not asked" if total is None else f"{total:.3f}"
            return (
                f"{request.id:8}  {text}\n          {record.finish_reason.name.lower()} after "
                f"{num_records} record{'s' * (num_records > 1)}, cumulative logprob {logprob}"
            )


async def heartbeat(beats) -> None:
    """Count how often the rest of the program gets its turn: nothing here blocks the event loop."""
    while True:
        await asyncio.sleep(0.01)
        beats.append(None)


async def main() -> None:
    inboxes = {request.id: asyncio.Queue() for request in story.REQUESTS}
    readers = [RingReader.create(16, 1 << 16, doorbell=True, wait="block") for _ in SHARES]
    workers = [start_worker(reader, share) for reader, share in zip(readers, SHARES, strict=True)]
    if "--kill" in sys.argv:
        workers[1].kill()
    beats: list[None] = []
    try:
        async with asyncio.TaskGroup() as group:
            other = group.create_task(heartbeat(beats))
            reading = [
                group.create_task(read(reader, admit_all(share), inboxes))
                for reader, share in zip(readers, SHARES, strict=True)
            ]
            for answer in asyncio.as_completed(
                [serve(request, inboxes[request.id]) for request in story.REQUESTS]
            ):
                print(await answer)
            await asyncio.gather(*reading)
            other.cancel()
    finally:
        for reader, worker in zip(readers, workers, strict=True):
            reader.close()
            worker.wait()
    print(f"the event loop did {len(beats)} other things meanwhile")


if __name__ == "__main__":
    asyncio.run(main())
