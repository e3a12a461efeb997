"""A ring of messages between one producer and one consumer, in shared memory.

    producer                          slots                          consumer
    send() ----- copy in ----> [0][1][2]...[N-1][spare] ---- copy out -----> receive()

    free   (N)  acquire: may fill one slot                  release: slot is free again
    items  (0)  release: one message is complete            acquire: may read one message

The two semaphores are the only synchronisation: sem_post is a release and sem_wait an acquire
(POSIX, glibc), on weakly ordered CPUs too. A plain load of a shared word decides nothing but two
things that may come late: whether a semaphore is worth trying, and whether the consumer closed.
Both ends of each ordering edge carry one label in the code:

    COMMITTED  payload and header are stored before `items` is posted; read after it is taken
    CONSUMED   the payload was copied out before `free` is posted; overwritten after it is taken
    JOINED     the attacher's line is stored before `joined` is posted; read after it is taken

Message number s (0, 1, 2, ...; it never wraps) lives in slot s mod (N + 1). At most N messages
are in flight, so the slot of the next one is always free: the end of stream goes there without
taking a credit, and close() never waits.

    state of message s        who may touch its slot   left by
    free                      producer                 free.acquire (not for the end of stream)
    being written             producer                 items.release                 COMMITTED
    committed                 nobody                   items.acquire
    being read                consumer                 free.release                  CONSUMED
    free, for s + N + 1       producer

A process that is killed leaves its message in one of these states, and the ring is never
repaired: what was committed is still delivered, then the reader gets PeerDied. A restart is a new
ring (`RingReader.successor`).

What a signal handler raises (KeyboardInterrupt, SystemExit) passes through send() and receive()
and leaves the ring in order: CPython runs handlers after calls and at jumps, so each commit below
is a run of plain assignments followed by the one call that publishes it. After an interrupted
send(), `counters().messages` says whether that message was sent. An interrupted receive() that
had taken a message hands it out at the next call.
"""

from ipc.reader import ReceivedMessage, RingReader
from ipc.side import RingCounters
from ipc.writer import RingWriter

__all__ = ["ReceivedMessage", "RingCounters", "RingReader", "RingWriter"]
