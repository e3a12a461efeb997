"""Records in a notebook: their tokens as a piece of HTML, colored by logprob.

Notebooks call `_repr_html_` of what a cell ends with. A record knows no strings, so its tokens are
their ids; `jax_specdec.export.colored` shows their texts. The colors are shades that suit light and
dark pages, the piece has no script, and whatever it shows is escaped.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from jax_specdec.wording import pluralize

_MOST_TOKENS = 2000  # of a piece; the page of `jax-specdec view` is for more
MOST_CANDIDATES = 5  # of the top K, in the hint of a token
# The upper end of each band of surprise (-logprob), and how strong its shade is.
_BANDS = ((0.1, 0.0), (0.5, 0.15), (1.5, 0.3), (3.0, 0.5), (6.0, 0.7), (math.inf, 0.9))


class _Shown(Protocol):
    """The fields of a record that a notebook shows: see `Record`."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_accepted(self) -> int: ...
    @property
    def token_ids(self) -> Any: ...
    @property
    def token_ranks(self) -> Any: ...
    @property
    def logprobs(self) -> Any: ...
    @property
    def topk_ids(self) -> Any: ...


def fragment(records: Iterable[_Shown], text: Callable[[int], str] | None = None) -> str:
    """A `<div>` with the tokens of each request, in the order in which requests come first.

    Args:
      records: of any requests, each one's own in order. Those beyond MOST_TOKENS are only counted.
      text: the string of a token id. None: tokens are shown as their ids.
    """
    from html import escape

    lines: dict[str, list[str]] = {}
    tokens = ((record, token) for record in records for token in _tokens(record, text))
    for record, (shown, style, hint) in itertools.islice(tokens, _MOST_TOKENS):
        span = f'<span style="{style}" title="{escape(hint)}">{escape(shown)}</span>'
        lines.setdefault(record.request_id, []).append(span)
    num_hidden = sum(1 for _ in tokens)
    drawn = [
        f"<div><b>{escape(name)}</b> {('' if text else ' ').join(spans)}</div>"
        for name, spans in lines.items()
    ]
    if num_hidden:
        drawn.append(f"<div>and {pluralize(num_hidden, 'token', ',')} more</div>")
    return (
        '<div style="font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere">'
        f"{''.join(drawn) or 'no tokens'}</div>"
    )


def _tokens(record: _Shown, text: Callable[[int], str] | None) -> Iterator[tuple[str, str, str]]:
    """Yield each token of a record: what is shown of it, its style, and its hint."""
    logprobs, ranks, topk_ids = record.logprobs, record.token_ranks, record.topk_ids
    name = text or str
    for at, token_id in enumerate(record.token_ids.tolist()):
        accepted = at < record.num_accepted
        hints = [f"id {token_id}", "accepted draft"] if accepted else [f"id {token_id}"]
        style = "border-bottom:2px solid #16a34a" if accepted else ""
        if logprobs is not None and ranks is not None and topk_ids is not None:
            logprob, *values = logprobs[at].tolist()
            if math.isnan(logprob):
                hints.append("invalid row")
                style += ";background:rgba(128,128,128,.5)"
            else:
                hints.append(f"logprob {logprob:.4g}, rank {ranks[at]}")
                shade = next(shade for upper, shade in _BANDS if -logprob <= upper)
                style += f";background:rgba(234,88,12,{shade})"
            candidates = zip(topk_ids[at].tolist()[:MOST_CANDIDATES], values, strict=False)
            hints += [
                f"{name(candidate)!r}: {value:.4g}"
                for candidate, value in candidates
                if candidate >= 0
            ]
        yield name(token_id), style.lstrip(";"), "\n".join(hints)
