"""The ring against a model: a bounded queue of byte strings with an end."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ipc import RingReader, RingWriter, errors
from tests.support.ring_checks import assert_slots_are_accounted_for

SLOT_BYTES = 40
PARTS = st.lists(st.binary(max_size=SLOT_BYTES), max_size=3)
EDGES = st.sampled_from([[bytes(SLOT_BYTES)], [bytes(SLOT_BYTES), b"+"]])


class RingMachine(RuleBasedStateMachine):
    """Every call of either side, in any order; the model says what each must do."""

    @initialize(
        num_slots=st.integers(1, 5),
        reader_creates=st.booleans(),
        wait=st.sampled_from(["predict", "block", "spin"]),
        checksum=st.booleans(),
        doorbell=st.booleans(),
    )
    def create(self, num_slots, reader_creates, wait, checksum, doorbell):
        first, second = (RingReader, RingWriter) if reader_creates else (RingWriter, RingReader)
        creator = first.create(
            num_slots, SLOT_BYTES, wait=wait, checksum=checksum, doorbell=doorbell
        )
        attacher = second.attach(creator.name, wait=wait)
        self.reader, self.writer = (creator, attacher) if reader_creates else (attacher, creator)
        self.capacity = num_slots
        self.queue: deque[tuple[int, bytes]] = deque()
        self.sent = self.received = self.sent_bytes = 0
        self.writer_open = self.reader_open = True

    @precondition(lambda self: self.writer_open)
    @rule(parts=PARTS | EDGES)
    def send(self, parts):
        data = b"".join(parts)
        if len(data) > SLOT_BYTES:
            said = f"of {len(data)} bytes does not fit a slot of {SLOT_BYTES}"
            with pytest.raises(errors.MessageTooLarge, match=said) as refused:
                self.writer.send(*parts, timeout=0)
            assert (refused.value.size, refused.value.limit) == (len(data), SLOT_BYTES)
        elif not self.reader_open:
            with pytest.raises(errors.PeerClosed):
                self.writer.send(*parts, timeout=0)
        elif len(self.queue) == self.capacity:
            with pytest.raises(errors.RingFull):
                self.writer.send(*parts, timeout=0)
        else:
            assert self.writer.send(*parts, timeout=0) == self.sent
            self.queue.append((self.sent, data))
            self.sent += 1
            self.sent_bytes += len(data)

    @precondition(lambda self: self.reader_open)
    @rule(how=st.sampled_from(["receive", "try"]))
    def receive(self, how):
        call = self.reader.try_receive if how == "try" else lambda: self.reader.receive(timeout=0)
        if self.queue:
            assert self.reader.ready()
            message = call()
            assert (message.sequence, message.data) == self.queue.popleft()
            assert 0 < message.send_time_ns <= message.receive_time_ns
            self.received += 1
        elif not self.writer_open:
            with pytest.raises(errors.EndOfStream, match=f"messages sent: {self.sent}$"):
                call()
        elif how == "try":
            assert call() is None
        else:
            with pytest.raises(errors.RingTimeout):
                call()

    @rule()
    def close_writer(self):
        self.writer.close()
        self.writer_open = False
        with pytest.raises(errors.RingClosed):
            self.writer.send(b"")

    @rule()
    def close_reader(self):
        self.reader.close()
        self.reader_open = False
        with pytest.raises(errors.RingClosed):
            self.reader.receive(0)

    @invariant()
    def counters_agree(self):
        if not hasattr(self, "queue"):
            return
        sent, received = self.writer.counters(), self.reader.counters()
        assert sent.messages == self.sent + (not self.writer_open)
        assert sent.payload_bytes == self.sent_bytes
        assert received.messages == self.received
        assert received.payload_bytes == self.sent_bytes - sum(len(d) for _, d in self.queue)
        if self.writer_open:
            assert sent.depth == len(self.queue)
        if self.reader_open and self.writer_open:
            assert received.depth == len(self.queue)

    @invariant()
    def every_slot_is_free_or_in_flight(self):
        if hasattr(self, "queue"):
            assert_slots_are_accounted_for(self.writer)

    def teardown(self):
        if hasattr(self, "queue"):
            self.writer.close()
            self.reader.close()


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=40)


@pytest.mark.slow
class TestRingAtLength(RingMachine.TestCase):
    settings = settings(
        max_examples=2000, stateful_step_count=40, derandomize=False, database=None, deadline=None
    )
