"""The content that contenders of the loop deliver, in one form, and its comparison.

The consumer's process uses it, so nothing here imports jax.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.timing import BenchError

ROUNDING = 1e-4  # of the naive kernel, which subtracts in another order


@dataclass(frozen=True)
class Part:
    """One request's part of one step: n tokens."""

    ids: list[int] | None  # None: this design does not say which id of a token was emitted
    logprobs: list[dict[int, float]]  # [n] by id: the emitted token and the top K; []: not asked
    ranks: list[dict[int, int]]  # [n] by id: at least the emitted token's
    drafts: int = 0  # the number of drafts with logprobs


Step = Mapping[int, Part]  # by slot


def content_of(results: Any) -> dict[int, Part]:
    """One step's content, by slot, from the results of any design."""
    if isinstance(results, tuple):  # ours: a message and its records
        return {record.slot: _of_record(record) for record in results[1]}
    return {  # objects: a dictionary a token
        slot: Part(
            None,
            [{id: one.logprob for id, one in by_id.items() if id >= 0} for by_id in positions],
            [{id: one.rank for id, one in by_id.items() if id >= 0} for by_id in positions],
        )
        for slot, positions in enumerate(results)
    }


def _of_record(record: Any) -> Part:
    ids, rows = record.token_ids.tolist(), record.logprobs
    if rows is None:
        return Part(ids, [], [])
    drafts = 0 if record.draft is None else len(record.draft.logprobs)
    by_id = [  # a column with id -1 is empty: the row has fewer than K possible tokens
        {**{i: p for i, p in zip(top, row[1:], strict=True) if i >= 0}, id: row[0]}
        for id, row, top in zip(ids, rows.tolist(), record.topk_ids.tolist(), strict=True)
    ]
    ranks = zip(ids, record.token_ranks.tolist(), strict=True)
    return Part(ids, by_id, [{id: rank} for id, rank in ranks], drafts)


def check(
    name: str,
    steps: Sequence[Step],
    baseline: Sequence[Step],
    asked: Sequence[int | None],
    like: Sequence[Step] | None = None,
    drafts: int = 0,
) -> None:
    """Check that tokens are the baseline's, and that each request got the logprobs it asked for.

    Args:
      name: the contender, for the error.
      steps: the delivered content.
      baseline: the content of the loop without logprobs.
      asked: K of each slot's request; None: no logprobs.
      like: steps whose requests all asked for at least as many logprobs, to compare values with;
        None: there are none in this mode, and only the number of logprobs is checked.
      drafts: how many drafts of each step must have logprobs.

    Raises:
      BenchError: a step differs; names the step, the request and the difference.
    """
    if len(steps) != len(baseline):
        raise BenchError(f"{name} took {len(steps)} steps, the baseline {len(baseline)}")
    for number, step in enumerate(steps):
        for slot, k in enumerate(asked):
            wanted = baseline[number].get(slot)
            part = step.get(slot)
            try:
                if wanted is None or part is None:
                    assert wanted is part, f"has {part}, the baseline {wanted}"
                    continue
                assert wanted.ids is not None, "the baseline must say what was emitted"
                same_part(part, wanted.ids, k, None if like is None else like[number][slot])
                assert part.drafts == drafts, f"logprobs of {part.drafts} drafts, not {drafts}"
            except AssertionError as error:
                raise BenchError(f"{name}: step {number}, request {slot}: {error}") from error


def same_part(part: Part, ids: Sequence[int], k: int | None, like: Part | None) -> None:
    """Raises AssertionError unless `part` has these tokens with logprobs as in `like`."""
    assert part.ids in (None, ids), f"tokens {part.ids}, not {ids}"
    if k is None:
        assert not part.logprobs, f"logprobs {part.logprobs} that the request did not ask for"
        return
    assert len(part.logprobs) == len(ids), f"logprobs of {len(part.logprobs)} of {len(ids)} tokens"
    for place, (id, row, ranks) in enumerate(zip(ids, part.logprobs, part.ranks, strict=True)):
        assert id in row, f"token {place}: no logprob of token {id}, which was emitted"
        # Fewer than K where they are every possible token: their probabilities sum to one.
        whole = len(row) < k and abs(sum(map(math.exp, row.values())) - 1) <= ROUNDING
        enough = len(row) in (k, k + 1) or whole
        assert enough, f"token {place}: {len(row)} logprobs, not {k} or {k + 1}"
        if like is not None:
            assert ranks[id] == like.ranks[place][id], f"token {place}: rank {ranks[id]}"
            more = like.logprobs[place]
            top = sorted(more, key=lambda id: (-more[id], id))[:k]
            wanted = {one: more[one] for one in (*top, id)}
            assert same_row(row, wanted), f"token {place}: logprobs {row}, not {wanted}"


def same_row(row: Mapping[int, float], wanted: Mapping[int, float]) -> bool:
    """Whether two rows are equal within `ROUNDING`; ids that close may take the last place."""
    last = min(wanted.values())
    return len(row) == len(wanted) and all(
        abs(row.get(id, last) - wanted.get(id, last)) <= ROUNDING for id in row.keys() | wanted
    )
