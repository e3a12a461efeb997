"""What tests of rings share: both sides in this process, and nothing left in /dev/shm."""

import contextlib

import pytest

from ipc import RingReader, RingWriter
from tests.support.ring_checks import leftovers


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert leftovers() == []


@pytest.fixture
def pair():
    """Makes a ring's reader and its writer, which close with the test."""
    with contextlib.ExitStack() as stack:

        def make(num_slots=4, slot_bytes=64, *, wait="predict", **options):
            reader = RingReader.create(num_slots, slot_bytes, wait=wait, **options)
            stack.enter_context(reader)
            return reader, stack.enter_context(RingWriter.attach(reader.name, wait=wait))

        yield make
