"""What pass 2 writes of a row."""

from typing import Any, Literal, NamedTuple

from pallas_kernels.contract.types import Outputs

# What column 0 holds: the given token, or the greedy choice. Parts of longer rows have no column 0,
# and their top K stay logits.
Mode = Literal["given", "greedy", "parts"]


class RowOutputs(NamedTuple):
    """Outputs of R rows; K1 is K + 1, or K for "parts", whose skipped rows are not initialized."""

    ids: Any  # [R * K1] i32
    values: Any  # [R * K1] f32: logprobs; logits for "parts"
    ranks: Any  # [R] i32: token ranks; the number of larger logits for "parts"
    statistics: Any  # [2 * R] f32: maxima, then logs of sums; sums for "parts"
    # What is wanted besides, see `more_outputs`: an output of its own, since a slice would be a
    # launch.
    top_logits: Any = None  # [R * K] f32
    log_sum_exp: Any = None  # [R] f32
    entropy: Any = None  # [R] f32; for "parts" what `RowSums.weighted` is


def num_selected(k: int, mode: Mode) -> int:
    """The number of tokens of a row to select: the greedy choice is the first."""
    return max(k, 1) if mode == "greedy" else k


def more_outputs(wanted: Outputs, mode: Mode) -> dict[str, int]:
    """The optional outputs that there are, by name, with the numbers that each has of a row."""
    whole = mode != "parts"  # XLA makes the others of parts
    there = {
        "top_logits": wanted.k if wanted.top_logits and whole else 0,
        "log_sum_exp": int(wanted.log_sum_exp and whole),
        "entropy": int(wanted.entropy),
    }
    return {name: size for name, size in there.items() if size}


def first_column(mode: Mode) -> int:
    """The column where the top K start."""
    return 0 if mode == "parts" else 1
