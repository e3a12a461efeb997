"""Reports and errors say "1 message" and "2 messages"."""

from jax_specdec.wording import pluralize


def test_a_number_and_what_it_counts():
    assert [pluralize(n, "message") for n in (0, 1, 2)] == ["0 messages", "1 message", "2 messages"]
    assert pluralize(57_056, "weight", ",") == "57,056 weights"
