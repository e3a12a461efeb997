"""Records in other people's formats: OpenAI's responses, columns, Arrow and Parquet. No jax.

A small door beside `jax_specdec.engine`: it stands above it, so that the engine needs no format.
"""

from jax_specdec.export import arrow, openai
from jax_specdec.export.column_builder import ColumnBuilder
from jax_specdec.export.token_columns import Ragged, TokenColumns
from jax_specdec.text.detokenize import TextStream, TokenTable

__all__ = [
    "openai",
    "arrow",
    "ColumnBuilder",
    "TokenColumns",
    "Ragged",
    "TokenTable",
    "TextStream",
]
