"""A ring of messages between one producer and one consumer, in shared memory.

    producer                                                      consumer
    send() -- payload -----> slots [0][1]...[N-1], a free one ----> receive()
           -- descriptor --> number s mod (N + 1) ---------------->

    items  (0)  release: one message is complete           acquire: may read one message
    freed  (0)  acquire: one message's slot is free again  release: the message was copied out

The two semaphores are the only synchronisation: sem_post is a release and sem_wait an acquire
(POSIX, glibc), on weakly ordered CPUs too. A plain load of a shared word decides nothing but two
things that may come late: whether a semaphore is worth trying, and whether the consumer closed.
Both ends of each ordering edge carry one label in the code:

    COMMITTED  payload and descriptor are stored before `items` is posted; read after it is taken
    CONSUMED   the payload was copied out before `freed` is posted; overwritten after it is taken
    JOINED     the attacher's line is stored before `joined` is posted; read after it is taken

Message number s is 0, 1, 2, ...; it never wraps. Its payload goes into the free slot that was
freed last, which the caches of both cores still hold, and its descriptor names that slot. All slots
are free at the start. Messages are consumed in order, so the i-th unit of `freed` says that message
i has left its slot; the producer keeps its own record of which slot that was.

    state of message s        who may touch its slot   left by
    not sent                  producer                 choosing a free slot
    being written             producer                 items.release                 COMMITTED
    committed                 nobody                   items.acquire
    being read                consumer                 freed.release                 CONSUMED
    consumed                  nobody                   freed.acquire, s-th unit
    known to be consumed      producer                 (the slot is free)

At most N messages are in flight, so one of the N + 1 descriptors is always free: the end of stream
goes there without a slot, and close() never waits.

A process that is killed leaves its message in one of these states, and the ring is never
repaired: what was committed is still delivered, then the reader gets PeerDied. A restart is a new
ring (`RingReader.successor`).

What a signal handler raises (KeyboardInterrupt, SystemExit) passes through send() and receive()
and leaves the ring in order: CPython runs handlers after calls and at jumps, so each commit below
is a run of plain assignments followed by the one call that publishes it. After an interrupted
send(), `counters().messages` says whether that message was sent. An interrupted receive() that
had taken a message hands it out at the next call.
"""

from ipc.endpoint import RingCounters
from ipc.reader import ReceivedMessage, RingReader
from ipc.writer import RingWriter

__all__ = ["ReceivedMessage", "RingCounters", "RingReader", "RingWriter"]
