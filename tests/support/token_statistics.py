"""A chi-square test of the first tokens of many requests, by what came before each."""

from collections import Counter

import numpy as np
import scipy


def cells(observed, conditional, expected, prefix=()):
    """(found, expected) of the tokens that sequences begin with; seldom ones are one.

    Args:
      observed: the tokens of those sequences that begin with `prefix`.
      conditional: the probabilities [V] float64 of the token behind a prefix.
      expected: how many such sequences there should be.
    """
    if len(observed) == 0 or len(prefix) == len(observed[0]) or expected < 15:
        return [(len(observed), expected)]
    wanted = expected * conditional(prefix)
    found = Counter(tokens[len(prefix)] for tokens in observed)
    often = np.flatnonzero(wanted >= 5).tolist()
    impossible = sum(count for token, count in found.items() if wanted[token] == 0)
    seldom = len(observed) - sum(found[token] for token in often) - impossible
    result = [(seldom, expected - wanted[often].sum()), (impossible, 0)]
    for token in often:
        after = [tokens for tokens in observed if tokens[len(prefix)] == token]
        result += cells(after, conditional, wanted[token], (*prefix, token))
    return result


def p_value(observed, conditional):
    """That sequences of tokens are such by chance; cells of fewer than five are one.

    It is 0 where a token came that cannot come.
    """
    every = cells(observed, conditional, len(observed))
    if any(found and expected == 0 for found, expected in every):
        return 0.0
    often = [cell for cell in every if cell[1] >= 5]
    assert len(often) > 10
    found, wanted = map(list, zip(*often, strict=True))
    if (rest := len(observed) - sum(wanted)) > 1:
        found, wanted = [*found, len(observed) - sum(found)], [*wanted, rest]
    return scipy.stats.chisquare(found, np.array(wanted) * (sum(found) / sum(wanted))).pvalue
