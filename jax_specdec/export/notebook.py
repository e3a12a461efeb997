"""Records with their texts, for a notebook."""

from collections.abc import Iterable
from dataclasses import dataclass

from jax_specdec.records.notebook import fragment
from jax_specdec.records.record import Record
from jax_specdec.text.detokenize import TokenTable


@dataclass(frozen=True)
class Colored:
    """Texts that a notebook shows; see `colored`."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def colored(records: Iterable[Record], table: TokenTable) -> Colored:
    """The texts of records as a notebook shows them: each token colored by its logprob.

    A token that was an accepted draft is underlined; its hint has its logprob, rank and first
    candidates. What a token says is escaped.

    Args:
      records: of any requests, each one's own in order; the first 2000 tokens are shown.
      table: the strings of the tokenizer.
    """
    return Colored(fragment(records, table.text.__getitem__))
