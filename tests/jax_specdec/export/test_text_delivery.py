"""What a client gets of records with stop strings, against the definition; cut records."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jax_specdec.export.delivery import Delivery
from jax_specdec.records.batch import FinishReason
from jax_specdec.text.detokenize import TextStream, TokenTable
from jax_specdec.text.stop_strings import StopStrings
from tests.support.openai_records import records_of
from tests.support.processor_messages import target, tokens

TABLE = TokenTable([b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"", b"\xc3\xa9b"], {8: "</s>"})


def reference(text, strings, least=0):
    """The end by definition: the shortest beginning of the text that ends with one of them.

    It has more than `least` characters.
    """
    for length in range(least + 1, len(text) + 1):
        found = [one for one in strings if text[:length].endswith(one)]
        if found:
            longest = max(found, key=len)
            return longest, length - len(longest), length
    return None


@example([[3]], ["a", "ba"], False, 0)  # complete at once
@example([[1], [2], [0]], ["ab"], False, 2)  # complete before the text may end
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=8),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.integers(0, 4),
)
def test_text_and_tokens_end_where_the_definition_says(groups, stops, keep, min_tokens):
    ids = [one for group in groups for one in group]
    stream = TextStream(TABLE)
    whole, offsets = stream.push_with_offsets(ids)
    whole += stream.finish()
    stream, ends = TextStream(TABLE), []
    for one in ids:
        stream.push([one])
        ends.append(stream.length)
    delivery, parts = Delivery(TABLE, stops, keep=keep, min_tokens=min_tokens), []
    steps = [target(number, tokens(*group)) for number, group in enumerate(groups)]
    for record in records_of(*steps, max_tokens=len(ids)):
        parts += delivery.push(record)
        if delivery.stop_text is not None:
            break
    text = "".join(part.text for part in parts)
    kept = [one for part in parts for one in part.record.token_ids.tolist()]
    least = 0 if not min_tokens else len(whole) if min_tokens >= len(ids) else ends[min_tokens - 1]
    found = reference(whole, stops, least) if stops else None
    if found is None:
        assert (delivery.stop_text, text, kept) == (None, whole, ids)
        return
    end = found[2] if keep else found[1]
    assert delivery.stop_text == found[0]
    assert text == whole[:end]
    assert parts[-1].record.finish_reason is FinishReason.STOP_STRING
    assert all(part.record.finish_reason is None for part in parts[:-1])
    complete = next(n for n, at in enumerate(ends) if at >= found[2])  # the last one that counts
    behind = [n for n in range(len(ids)) if offsets[n] >= end and TABLE.text_bytes[ids[n]]]
    assert kept == ids[: min([*behind, complete + 1])]
    assert [x for part in parts for x in part.offsets] == offsets[: len(kept)]


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_back_than_must_be(text, strings):
    stops = StopStrings(strings, keep=False)
    stops.push(text)
    if stops.found is not None:
        return
    possible = [len(text)]  # where a string could still begin
    for begin in range(len(text)):
        if any(one.startswith(text[begin:]) for one in strings):
            possible.append(begin)
    assert stops.certain == min(possible)


def test_a_record_is_cut_with_its_logprobs():
    (record,) = records_of(target(0, tokens(2, 3, 4, columns=2)), max_tokens=9, logprobs=1)
    names = "token_ids", "logprobs", "topk_ids", "token_ranks"
    arrays = {name: getattr(record, name) for name in names}  # it was read before it is cut
    cut = record.cut(2, -0.5, FinishReason.STOP_STRING)
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(cut, name), array[:2])
    assert (cut.cumulative_logprob, cut.finish_reason) == (-0.5, FinishReason.STOP_STRING)
    assert (cut.num_drafts, cut.num_accepted) == (record.num_drafts, record.num_accepted)
    assert record.num_tokens == 3  # the other one is as it was


def test_the_sum_of_a_cut_text_is_that_of_its_tokens():
    messages = target(0, tokens(1, columns=1)), target(1, tokens(1, 0, 1, columns=1))
    first, second = records_of(*messages, max_tokens=9, logprobs=0)
    delivery = Delivery(TABLE, ["ab"])
    parts = [part for record in (first, second) for part in delivery.push(record)]
    assert delivery.stop_text == "ab"
    assert [part.record.token_ids.tolist() for part in parts] == [[1], [1]]
    total = first.cumulative_logprob + second.logprobs[0, 0]
    assert parts[-1].record.cumulative_logprob == pytest.approx(total)
