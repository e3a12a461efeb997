"""What a call is to return of each row."""

from typing import Literal, NamedTuple, get_args

RankTies = Literal["strict", "inclusive"]


class Wanted(NamedTuple):
    """The static part of a call: it decides the program, and the shapes that come out of it."""

    k: int
    log_sum_exp: bool = False
    entropy: bool = False
    top_logits: bool = False
    inclusive: bool = False  # ranks count equal logits too


def is_inclusive(rank_ties: str) -> bool:
    """Whether ranks count equal logits too.

    Raises:
      ValueError: there is no such way to count.
    """
    if rank_ties not in get_args(RankTies):
        raise ValueError(
            f"rank_ties = {rank_ties!r} is not known; choose one of "
            f"{', '.join(map(repr, get_args(RankTies)))}"
        )
    return rank_ties == "inclusive"
