"""The door to other formats of records: OpenAI, columns, Arrow, Prometheus.

It stands above `jax_specdec.engine`, so that the engine knows no format; the modules behind it may
change. Libraries that a format needs are imported on its first use.
"""

import jax_specdec.beside.ipc  # noqa: F401
from jax_specdec.export import arrow, metrics, openai
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.notebook import Colored, colored
from jax_specdec.export.rollouts import rollouts_table, tunix_batch, verl_batch
from jax_specdec.export.token_columns import Ragged, TokenColumns
from jax_specdec.kept_sets import KeptSets, PaddedKept
from jax_specdec.text.detokenize import TextStream, TokenTable, byte_level_bytes

__all__ = [
    "openai", "arrow", "metrics", "ColumnBuilder", "TokenColumns", "Ragged", "KeptSets",
    "PaddedKept", "rollouts_table", "verl_batch", "tunix_batch", "TokenTable", "TextStream",
    "byte_level_bytes", "colored", "Colored",
]  # fmt: skip
