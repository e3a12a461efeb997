"""Bytes of a byte-level vocabulary, against the library that writes it."""

from tokenizers import pre_tokenizers

from jax_specdec.text.detokenize import byte_level_bytes


def test_byte_level_bytes_are_those_of_the_tokenizers_library():
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    every_byte = "".join(map(chr, range(128))) + "\u00ff\u0100\N{SNOWMAN}\U0001f600"
    for text in (*every_byte, every_byte):
        ((token, _),) = split.pre_tokenize_str(text)
        assert byte_level_bytes(token) == text.encode()


def test_its_alphabet_has_256_bytes():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(map(byte_level_bytes, alphabet)) == [bytes([n]) for n in range(256)]
