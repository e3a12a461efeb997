"""Limits of the TPU kernels, and where they are faster than XLA."""

import jax

MAX_COLUMNS = 2**19  # of which two units of rows take half of a v5p's VMEM

# By the compiler's cycles XLA's sums of groups win below so many tokens: two groups.
LEAST_GROUPED = 512

# The least vocabulary for which the kernel takes fewer cycles, for so many columns of a top K.
LEAST_VOCABULARY = ((5, 512), (1, 8192), (0, 32_768))

# So many columns of a top K are few enough for the stacks of each 16384 tokens, up to 512: where
# there are more, most rows would be swept over K times. Rows of random logits overflow at 128 of
# 16384, and not at 128 of 32768 or 512 of 131072.
REACH, REACHED = 64, 16_384

# A unit of 16-bit rows has 16 of them; so many or fewer leave half of every register empty.
HALF_EMPTY_ROWS = range(2, 9)


def obstacle(logits: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the TPU kernel cannot run on logits [N, V] on any TPU; None if it can."""
    if not all(isinstance(size, int) for size in logits.shape):
        return f"the shape {logits.shape} is symbolic, and a kernel's grid is not"
    if logits.shape[1] > MAX_COLUMNS:
        return f"rows of {logits.shape[1]} logits do not fit VMEM ({MAX_COLUMNS} do)"
    return None


def is_faster(logits: jax.Array, size: tuple[int, int] | None) -> bool:
    """Whether the kernels are faster than XLA.

    Args:
      logits: [N, V].
      size: target rows and columns that are selected; None: of all rows, groups are read.
    """
    if size is None:
        return logits.shape[1] >= LEAST_GROUPED
    rows, k = size
    return kernel_is_faster(rows, logits.shape[1], k, logits.dtype.name)


def kernel_is_faster(rows: int, vocabulary: int, k: int, dtype: str) -> bool:
    """Whether the kernel takes fewer cycles than XLA on a v6e; not where a size is symbolic.

    Args:
      rows: target rows.
      vocabulary: V, or the columns of a shard.
      k: columns that are selected.
      dtype: of the logits.
    """
    if not all(isinstance(size, int) for size in (rows, vocabulary)):
        return False
    if k > REACH * max(1, min(8, vocabulary // REACHED)):
        return False
    if k == 0 and dtype == "bfloat16" and rows in HALF_EMPTY_ROWS:
        return False
    return vocabulary >= next(least for least_k, least in LEAST_VOCABULARY if k >= least_k)
