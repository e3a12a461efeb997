"""Which replica gets a request: free slots, then prompts' beginnings, then tokens."""

from jax_specdec.ray import routes
from jax_specdec.ray.routes import Load, Routes
from jax_specdec.requests import packed_ids


def made(*slots, ahead=1, chunk=2):
    found = Routes(chunk)
    for replica, count in enumerate(slots):
        found.loads[replica] = Load(count, ahead)
    return found


def send(found, prompt, tokens=10):
    replica = found.choose(packed_ids(prompt))
    if replica is not None:
        found.add(replica, packed_ids(prompt), tokens)
    return replica


def test_the_replica_with_most_free_slots_gets_it():
    found = made(2, 4, 3)
    assert [send(found, (n, n)) for n in range(9)] == [1, 2, 1, 0, 2, 1, 0, 2, 1]


def test_without_free_slots_the_fewest_tokens_count():
    found = made(1, 1)
    assert send(found, (1, 1), tokens=50) == 0
    assert send(found, (2, 2), tokens=5) == 1
    assert send(found, (3, 3)) == 1
    assert send(found, (4, 4)) == 0
    assert send(found, (5, 5)) is None
    found.end(1, 10)
    assert send(found, (5, 5)) == 1


def test_a_prompt_follows_its_beginning_to_a_free_slot():
    found = made(2, 4, chunk=2)
    assert send(found, (9, 9, 9, 9, 1)) == 1
    found.end(1, 10)
    found.loads[0].slots = 5  # replica 0 has more free slots now
    assert send(found, (8, 8, 9, 9, 1)) == 0  # another beginning
    assert send(found, (9, 9, 9, 9, 2)) == 1
    assert send(found, (9, 9, 7)) == 1  # one chunk in common
    assert send(found, (9,)) == 0  # no whole chunk
    found.loads[1].open = 4
    assert send(found, (9, 9, 9, 9, 3)) == 0


def test_a_longer_common_beginning_counts_more():
    found = made(4, 4, chunk=1)
    found.add(0, packed_ids((1, 2)), 10)
    found.add(1, packed_ids((1, 2, 3)), 10)
    found.loads[1].open += 1
    assert found.choose(packed_ids((1, 2, 3, 4))) == 1
    assert found.choose(packed_ids((7,))) == 0


def test_a_lost_replica_is_known_no_more():
    found = made(1, 3, chunk=1)
    assert send(found, (1, 2)) == 1
    found.forget(1)
    assert found.loads.keys() == {0}
    assert send(found, (1, 2)) == 0
    found.end(1, 5)  # of one that is gone: nothing happens
    found.emitted(1, 5)


def test_what_is_remembered_has_a_bound(monkeypatch):
    monkeypatch.setattr(routes, "ROUTE_MEMORY", 10)
    found = made(100, chunk=1)
    for n in range(50):
        send(found, (n,))
    assert len(found._seen) == 10
