"""Sizes that programs are compiled for: a batch takes the smallest that holds what it asks for.

They are few, so batches of changing size soon stop compiling.
"""

from ipc import wire
from jax_specdec.requests import MAX_BIASED_IDS, MAX_HELD_IDS

K_BUCKETS = (0, 5, 20, 64, 128, 256, 512)
CHOSEN_BUCKETS = (0, 16, wire.MAX_CHOSEN)
CHANGES_BUCKETS = (0, 16, 128, max(MAX_BIASED_IDS, MAX_HELD_IDS))


def k_bucket(k: int, vocab_size: int) -> int:
    """The smallest static K of at least `k`, at most the vocabulary."""
    for size in K_BUCKETS:
        if k <= size:
            return min(size, vocab_size)
    raise wire.WireError(f"K = {k} is over the limit {wire.MAX_TOP_K}")


def chosen_bucket(count: int) -> int:
    """The smallest width of a table of at least `count` chosen token ids."""
    for width in CHOSEN_BUCKETS:
        if count <= width:
            return width
    raise wire.WireError(f"{count} chosen token ids are over the limit {wire.MAX_CHOSEN}")


def changes_bucket(count: int) -> int:
    """The smallest width of tables of at least `count` biased or held ids; requests are checked."""
    return next(width for width in CHANGES_BUCKETS if count <= width)


def words_bucket(num_words: int) -> int:
    """The smallest copy of at least `num_words` words: a power of two, or one and a half of one.

    It is never more than half again what is needed.
    """
    power = 1 << max(num_words - 1, 1).bit_length()
    return power * 3 // 4 if num_words <= power * 3 // 4 else power
