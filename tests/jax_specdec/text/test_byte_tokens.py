"""The byte-level tokenizer: texts and bytes come back, special ids have names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_specdec.text import byte_tokens


@given(st.text())
def test_text_comes_back(text):
    ids = byte_tokens.encode(text)
    assert ids.dtype == np.int32
    assert byte_tokens.decode(ids) == text


@given(st.binary())
def test_bytes_come_back(data):
    assert byte_tokens.decode_bytes(byte_tokens.encode(data)) == data
    assert b"".join(byte_tokens.token_bytes(i) for i in byte_tokens.encode(data)) == data


def test_documents_start_with_the_special_id():
    assert byte_tokens.encode("ä", start_document=True).tolist() == [byte_tokens.EOS_ID, 0xC3, 0xA4]
    # A text cannot make a special id.
    assert byte_tokens.encode("<|eos|>").tolist() == list(b"<|eos|>")


def test_special_ids_have_names_and_others_are_refused():
    names = [byte_tokens.token_bytes(i) for i in range(256, byte_tokens.VOCAB_SIZE)]
    assert names[0] == b"<|eos|>"
    assert len(set(names)) == 8
    assert byte_tokens.decode([72, 105, byte_tokens.EOS_ID]) == "Hi<|eos|>"
    for wrong in (-1, byte_tokens.VOCAB_SIZE):
        with pytest.raises(ValueError, match=rf"token id {wrong} is outside 0\.\.263"):
            byte_tokens.token_bytes(wrong)
    assert byte_tokens.decode([0xC3]) == "�"
