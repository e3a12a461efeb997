"""The protocol between the two sides of a ring.

    producer                                                      consumer
    send() -- payload -----> slots [0][1]...[N-1], a free one ----> receive()
           -- descriptor --> number s mod (N + 1) ---------------->

    items  (0)  release: one message is complete           acquire: may read one message
    freed  (0)  acquire: one message's slot is free again  release: the message was copied out

These two semaphores are the only synchronisation: sem_post is a release and sem_wait an acquire
(POSIX, glibc), on weakly ordered CPUs too. Plain loads of shared words decide only two things, and
either may come late: whether a semaphore is worth trying, and whether the consumer has closed.
Both ends of each ordering edge carry one label in the code:

    COMMITTED  payload and descriptor are stored before `items` is posted; read after it is taken
    CONSUMED   the payload is copied out before `freed` is posted; overwritten after it is taken
    JOINED     the attacher's line is stored before `joined` is posted; read after it is taken

Messages have the numbers s = 0, 1, 2, ..., which never wrap. A payload goes into the free slot that
was freed last, which the caches of both cores still hold, and the descriptor names that slot. All
slots are free at the start. Messages are consumed in order, so unit number s of `freed` says that
message s has left its slot; the producer remembers which slot that was.

    state of message s        who may touch its slot   left by
    not sent                  producer                 choosing a free slot
    being written             producer                 items.release                 COMMITTED
    committed                 neither side             items.acquire
    being read                consumer                 freed.release                 CONSUMED
    consumed                  neither side             freed.acquire, unit s
    known to be consumed      producer                 (the slot is free)

At most N messages are in flight, so one of the N + 1 descriptors is always free. The end of stream
takes that descriptor and no slot, so close() never waits.

A process that is killed leaves its message in one of these states, and the ring is never repaired:
the reader still gets what was committed, then PeerDied. A restart makes a new ring.

An exception from a signal handler (KeyboardInterrupt, SystemExit) passes through send() and
receive() and leaves the ring in order: CPython runs handlers after calls and at jumps, so each
commit is a run of plain assignments followed by the one call that publishes it. After an
interrupted send(), `counters().messages` says whether that message was sent. If an interrupted
receive() had taken a message, the next call returns it.
"""

# The semaphores of a ring and their first values.
SEMAPHORES = {
    "freed": 0,  # messages whose slots are free again
    "items": 0,  # messages that the consumer may read
    "seat": 1,  # the one seat beside the creator's
    "joined": 0,  # posted once the attacher is complete
}
