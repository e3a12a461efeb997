"""Records and statistics of the product, in the words of the reference processor."""

import math

import numpy as np

from tests.support.random_kept import as_lists


def plain(value):
    """NumPy values as Python's; NaN as a string, so that it equals itself."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value


def as_dict(record, reference_names):
    """A record of the product in the words of the reference."""
    values = {name: plain(value_of(record, name)) for name in reference_names}
    reason, statistics = record.finish_reason, record.statistics
    values["finish_reason"] = None if reason is None else reason.name
    values["kept"] = as_lists(record.kept)
    values["prompt"] = prompt_rows(record.prompt)
    values["statistics"] = None if statistics is None else marginals_of(statistics)
    return values


def value_of(record, name):
    """The record's value of a name of the reference, which has the drafts' side by side."""
    part, _, rest = name.partition("draft_")
    if part or not rest:
        return getattr(record, name)
    return None if record.draft is None else getattr(record.draft, rest)


def prompt_rows(rows):
    """The rows one by one, each with its place in the prompt."""
    if rows is None:
        return None
    columns = (rows.token_ids, rows.logprobs, rows.chosen_logprobs, rows.token_ranks, rows.topk_ids)
    each = zip(*(plain(column) for column in columns), strict=True)
    return [[rows.start + n, *row] for n, row in enumerate(each)]


def marginals_of(statistics):
    return (
        statistics.steps_by_drafts,
        statistics.rejected_at,
        statistics.all_accepted,
        statistics.num_tokens,
    )


def marginals(steps):
    """The reference's list of (drafts, accepted, tokens) as the histograms of the product."""
    if steps is None:
        return None
    return (
        histogram([drafts for drafts, _, _ in steps]),
        histogram([accepted for drafts, accepted, _ in steps if accepted < drafts]),
        histogram([accepted for drafts, accepted, _ in steps if accepted == drafts]),
        sum(tokens for _, _, tokens in steps),
    )


def histogram(values):
    return tuple(values.count(n) for n in range(max(values, default=-1) + 1))
