"""Short runs of tests.heavy.ring_soak, and proofs that its checks can fail."""

import pytest

from ipc import RingReader, errors
from tests.heavy import ring_soak
from tests.support.ring_peer import is_intact, remove_semaphore, start_peer


def test_random_kills_under_load():
    result = ring_soak.check_kills(6, seed=1)
    assert result["failed"] == []
    assert result["messages"] > 100


def test_random_kills_while_attaching():
    assert ring_soak.check_kills(5, seed=2, early=True)["failed"] == []


@pytest.mark.parametrize("wait", ["predict", "block"])
def test_many_messages(wait):
    """A reader that kept them all would grow by 7 MB, which the check notices."""
    assert ring_soak.check_transfer(5000, wait, max_bytes=3000)["failed"] == []


def read_all(reader):
    for number, message in enumerate(reader):
        if not is_intact(message.data, number, 3000):
            raise errors.CorruptMessage(f"the payload of message {number} is damaged")
        assert number < 1_000_000, "a ring without semaphores went unnoticed"


@pytest.mark.parametrize("without", ["freed", "items"])
def test_negative_control_without_a_semaphore(tmp_path, without):
    """The reader notices that a semaphore is missing under the same stress."""
    with RingReader.create(4, 3000, wait="block") as reader:
        options = {"without": "freed"} if without == "freed" else {}
        peer = start_peer("produce", reader.name, tmp_path / "p", max_bytes=3000, **options)
        reader.wait_attached(30)
        if without == "items":
            remove_semaphore(reader, "items")
        with pytest.raises(errors.CorruptMessage, match="is damaged"):
            read_all(reader)
        peer.kill()
        peer.wait()
