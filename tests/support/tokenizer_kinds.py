"""Small tokenizers, each built as a public family's tokenizer.json is."""

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.tokenizer_files import CORPUS

TEXTS = [*CORPUS, "1234 can't  we?\n\n  x\t<|im_start|>system\n", " leading, 日本 \U0001f642!"]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501


def special(*names):
    return [AddedToken(name, special=True, normalized=False) for name in names]


def plain(*names):
    return [AddedToken(name, special=False, normalized=False) for name in names]


def beginning(made, name):
    ids = [(name, made.token_to_id(name))]
    made.post_processor = processors.TemplateProcessing(f"{name} $A", special_tokens=ids)


def byte_level_bpe(split, **model):
    made = Tokenizer(models.BPE(**model))
    made.pre_tokenizer = split
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXTS, trainer)
    return made


def gpt2():
    made = byte_level_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.add_tokens(special("<|endoftext|>"))
    return made


def by_words():
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


def qwen():
    """Ends of turns are special; a call of a function is an added token that is text."""
    made = byte_level_bpe(by_words())
    made.normalizer = normalizers.NFC()
    made.add_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    made.add_tokens(plain("<tool_call>", "</tool_call>", "<think>", "</think>"))
    return made


def llama3():
    made = byte_level_bpe(by_words(), ignore_merges=True)
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    made.add_tokens(special(*names))
    beginning(made, names[0])
    return made


def pieces_bpe(*special_names):
    """A vocabulary of pieces, with bytes for the rest, as SentencePiece makes it."""
    letters = sorted({c for text in TEXTS[:1] for c in text.replace(" ", "▁")} | {"▁", "\n"})
    pieces = [*special_names, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "q"), ("t", "h"), ("th", "e"), ("▁", "the"), ("o", "x"), ("▁", "▁")]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    made.add_special_tokens([AddedToken(one, normalized=False) for one in special_names])
    return made


OF_PIECES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIPPED = decoders.Sequence([*OF_PIECES, decoders.Strip(" ", 1, 0)])


def llama2():
    made = pieces_bpe("<unk>", "<s>", "</s>")
    marked = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence(marked)
    made.decoder = STRIPPED
    beginning(made, "<s>")
    return made


def mistral():
    made = pieces_bpe("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = STRIPPED
    beginning(made, "<s>")
    return made


def gemma():
    """Runs of spaces and of line ends are added tokens, which are no special ones."""
    made = pieces_bpe("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence(OF_PIECES)
    made.add_tokens(plain(*("▁" * n for n in range(2, 9)), "\n\n", "\n\n\n", "<table>"))
    beginning(made, "<bos>")
    return made


def unigram():
    letters = sorted({c for text in TEXTS for c in text.replace(" ", "▁")})
    pieces = ["<unk>", "</s>", "▁the", "ox", "▁q", "▁▁"]
    scores = [(piece, -1.0 - at / 100) for at, piece in enumerate([*pieces, *letters])]
    made = Tokenizer(models.Unigram(scores, unk_id=0))
    made.add_special_tokens(["<unk>", "</s>"])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    return made


def words_alone():
    """A tokenizer without a decoder: words are joined by spaces."""
    words = ["[UNK]", "the", "quick", "fox"]
    made = Tokenizer(models.WordLevel({one: at for at, one in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


KINDS = {
    one.__name__: one for one in (gpt2, qwen, llama3, llama2, mistral, gemma, unigram, words_alone)
}
# Those whose texts lack the spaces that their first token has.
WITHOUT_FIRST_SPACE = {"llama2", "mistral", "unigram", "words_alone"}
WITH_BYTES = {"llama2", "mistral", "gemma"}


def write(directory, made, template=None, **config):
    """Write a tokenizer; with a chat template, and what tokenizer_config.json has."""
    made.save(str(directory / "tokenizer.json"))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def of_transformers(reference, messages, functions=(), **options):
    """The ids of a conversation by transformers' tokenizer."""
    tools = [{"type": "function", "function": one} for one in functions] or None
    made = reference.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False, **options
    )
    return list(made)
