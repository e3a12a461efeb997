"""How many rows of logits are worked on at a time, by the platform that a program is for.

Starting an operation on a CPU costs as much as a few thousand logits, and a loop copies each of its
blocks: so small calls are one block. A thread that sleeps is woken in 20 to 50 us, which is as long
as all the work on a row: XLA's runtime hands over whatever is ready in a list of more than eight
operations, and its compiler splits loops that compute more than they read. `in_one_thread` keeps
the operations of few rows together, `few_in_one_thread` those of a part of their work;
`forms.in_one_loop` keeps a loop whole, where `is_one_loop`.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.backends.xla import selection
from pallas_kernels.lowering import forms

# On a CPU a block's temporaries fit its caches.
CPU_BYTES = 7 << 20
# Logits that one thread of a CPU has read before another is awake.
ONE_LOOP = 1 << 16
# Elsewhere each operation is a launch, so a block has as many rows as keep any such chip busy.
WIDE_ROWS = 256
# A loop over an unknown number of rows: its start costs as many launches as half of a block.
LOOP_ROWS = 384
TPU_LOOP_ROWS = 512
_Result = TypeVar("_Result", bound=forms.Tree)


def rows_on_cpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a CPU.

    Args:
      logits: [N, V].
      num_targets: R.
      k: columns to select.
      dynamic: whether the number of rows is known only when the program runs. Then blocks are
        smaller, so that the work follows it.
    """
    if is_symbolic(logits, num_targets):
        return num_targets
    itemsize = logits.dtype.itemsize
    vocabulary = logits.shape[1]
    # The sums and maxima of groups, and the selection.
    bytes_per_row = (
        vocabulary + vocabulary * itemsize // 8 + 8 * selection.selection_size(vocabulary, k)
    )
    copies = 2 * vocabulary * itemsize  # where rows are taken block by block
    if not dynamic and num_targets * bytes_per_row <= CPU_BYTES:
        return num_targets
    bytes_per_row += copies
    rows = max(1, CPU_BYTES // bytes_per_row)
    if dynamic:
        rows = min(rows, max(1, num_targets // 16))  # few are on the list of a decoding step
    rows = min(num_targets, rows)
    return -(-num_targets // -(-num_targets // rows))  # the last block repeats few rows


def rows_on_tpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a TPU; arguments as `rows_on_cpu`."""
    if is_symbolic(logits, num_targets) or not dynamic:
        return num_targets  # the TPU compiler needs no temporaries for them
    return min(num_targets, TPU_LOOP_ROWS)


def rows_on_gpu(logits: jax.Array, num_targets: int, k: int, dynamic: bool) -> int:
    """The number of rows to work on at a time on a GPU; arguments as `rows_on_cpu`."""
    if is_symbolic(logits, num_targets):
        return num_targets
    if dynamic:
        return min(num_targets, LOOP_ROWS)
    # All, if the selection's temporaries take no more than `WIDE_ROWS` rows in float32 would.
    vocabulary = logits.shape[1]
    bytes_per_row = 16 * selection.selection_size(vocabulary, k)
    return min(num_targets, max(WIDE_ROWS, WIDE_ROWS * 4 * vocabulary // bytes_per_row))


def is_symbolic(logits: jax.Array, num_targets: int) -> bool:
    """Whether a number of rows is a dimension variable of `jax.export`: all are one block then."""
    return not (isinstance(num_targets, int) and isinstance(logits.shape[0], int))


def in_one_thread(function: Callable[..., _Result], *arguments: forms.Tree) -> _Result:
    """function(*arguments), as a list of operations of its own for XLA's runtime."""
    always = forms.barrier(jnp.bool_(True))  # which the compiler does not see through
    return forms.in_branch(always, function, *arguments)


def few_in_one_thread(
    x: jax.Array, function: Callable[..., _Result], *arguments: forms.Tree
) -> _Result:
    """function(*arguments), a part of the work on rows x; of few rows as `in_one_thread`."""
    if selection.is_small_batch(x):
        return in_one_thread(function, *arguments)
    return function(*arguments)


def is_one_loop(x: jax.Array) -> bool:
    """Whether rows x [B, V] are so few and short that a loop over them stays in one thread."""
    return selection.is_small_batch(x) and x.size <= ONE_LOOP
