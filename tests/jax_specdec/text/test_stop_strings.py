"""Stop strings: where a text ends, whatever pieces it comes in."""

from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.text.stop_strings import StopStrings
from tests.support.stop_string_reference import reference

WORDS = st.text("ab", min_size=1, max_size=4)


@given(st.lists(WORDS, max_size=30), st.lists(WORDS, min_size=1, max_size=3), st.booleans())
def test_the_end_does_not_depend_on_the_pieces(pieces, strings, keep):
    stops, certain = StopStrings(strings, keep=keep), []
    for piece in pieces:
        stops.push(piece)
        certain.append(stops.text[: stops.certain])
        if stops.found is not None:
            break
    expected = reference("".join(pieces), strings)
    if expected is None:
        assert (stops.found, stops.end) == (None, None)
        whole = "".join(pieces)
    else:
        word, begin, behind = expected
        assert stops.found == word
        assert stops.end == (behind if keep else begin)
        whole = stops.text[: stops.end]
    assert all(whole.startswith(one) for one in certain)  # nothing is taken back


def test_what_may_not_end_the_text_completes_no_string_but_may_begin_one():
    stops = StopStrings(["ab", "b", "aab"])
    for text in ("ab", "a", "a"):
        stops.push(text, may_end=False)
    assert (stops.end, stops.certain) == (None, 2)
    stops.push("x")  # nothing that was complete before is found now
    assert stops.end is None
    stops.push("aa", may_end=False)
    stops.push("bb")
    assert (stops.found, stops.end) == ("aab", 5)


@given(st.text("ab", max_size=12), st.lists(WORDS, min_size=1, max_size=3))
def test_no_more_is_held_back_than_must_be(text, strings):
    stops = StopStrings(strings)
    stops.push(text)
    if stops.found is not None:
        return
    possible = [len(text)]  # where a string could still begin
    for begin in range(len(text)):
        if any(one.startswith(text[begin:]) for one in strings):
            possible.append(begin)
    assert stops.certain == min(possible)
