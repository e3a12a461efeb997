"""When the TPU kernel is worth its fixed cost, by the compiler's cycles.

The kernel's cost has a part for every unit of rows and every candidate, which short rows do not
repay: XLA keeps such a row in a few registers. `python -m bench.aot_tpu` compiles both on each side
of these limits and compares their cycles.
"""

# The least vocabulary for which the kernel takes fewer cycles, for so many columns of a top K.
LEAST_VOCABULARY = ((5, 512), (1, 8192), (0, 32_768))
# So many columns of a top K are few enough for the stacks of each 16384 tokens, up to 512: where
# there are more, most rows would be swept over K times. Rows of random logits overflow at 128 of
# 16384, and not at 128 of 32768 or 512 of 131072.
REACH, REACHED = 64, 16_384
# A unit of 16-bit rows has 16 of them; so many or fewer leave half of every register empty.
FEW_ROWS = range(2, 9)


def kernel_is_faster(rows: int, vocabulary: int, k: int, dtype: str) -> bool:
    """Whether the kernel takes fewer cycles than XLA on a v6e.

    Args:
      rows: target rows.
      vocabulary: V, or the columns of a shard.
      k: columns that are selected.
      dtype: of the logits.
    """
    if k > REACH * max(1, min(8, vocabulary // REACHED)):
        return False
    if k == 0 and dtype == "bfloat16" and rows in FEW_ROWS:
        return False
    return vocabulary >= next(least for least_k, least in LEAST_VOCABULARY if k >= least_k)
