"""The material of the examples: a text, its characters as tokens, three requests."""

import numpy as np

from jax_specdec.engine import Request, SamplingParams

# Lewis Carroll, Alice's Adventures in Wonderland, 1865.
TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank, and of having
nothing to do: once or twice she had peeped into the book her sister was reading, but it had no
pictures or conversations in it, and what is the use of a book, thought Alice, without pictures or
conversations? So she was considering in her own mind, as well as she could, for the hot day made
her feel very sleepy and stupid, whether the pleasure of making a daisy-chain would be worth the
trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran
close by her. There was nothing so very remarkable in that; nor did Alice think it so very much
out of the way to hear the Rabbit say to itself, Oh dear! Oh dear! I shall be late!""".replace(
    "\n", " "
)

ALPHABET = sorted(set(TEXT))
VOCAB = len(ALPHABET)


def encode(text: str) -> tuple[int, ...]:
    """Turn a text into token ids; only characters of `TEXT` have one."""
    return tuple(ALPHABET.index(character) for character in text)


def decode(token_ids) -> str:
    """Turn token ids into a text."""
    return "".join(ALPHABET[int(token_id)] for token_id in token_ids)


def write_tokenizer(folder) -> None:
    """Write the tokenizer as tokenizer.json: one token a character."""
    from pathlib import Path

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({one: id for id, one in enumerate(ALPHABET)}, ALPHABET[0]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.save(str(Path(folder) / "tokenizer.json"))


def log_probabilities(order: int) -> np.ndarray:
    """Compute log probabilities of a character after `order` others. [V] * (order + 1) float32.

    Each shorter context adds a tenth, so that every context has an answer.
    """
    ids, probabilities = encode(TEXT), np.full(VOCAB, 1 / VOCAB)
    for length in range(order + 1):
        counts = np.zeros((VOCAB,) * (length + 1))
        for start in range(len(ids) - length):
            counts[ids[start : start + length + 1]] += 1
        shorter = np.broadcast_to(probabilities, counts.shape)
        total = counts.sum(-1, keepdims=True)
        own = np.divide(counts, total, out=shorter.copy(), where=total > 0)
        probabilities = 0.9 * own + 0.1 * shorter
    return np.log(probabilities).astype(np.float32)


# Each asks for something else; they are decoded together, and each gets what it asked for.
REQUESTS = (
    Request(
        id="greedy",
        prompt_token_ids=encode("Alice was"),
        params=SamplingParams(
            max_tokens=60, logprobs=2, draft_logprobs=True, stop_token_ids=encode("?!"),
        ),
    ),
    Request(
        id="sampled",
        prompt_token_ids=encode("the Rabbit"),
        params=SamplingParams(
            max_tokens=60, temperature=0.7, top_p=0.9, seed=8, logprobs=0,
            stop_token_ids=encode("?!"),
        ),
    ),
    Request(
        id="ids only",
        prompt_token_ids=encode("So she"),
        params=SamplingParams(max_tokens=30, temperature=1.0, seed=7),
    ),
)  # fmt: skip
