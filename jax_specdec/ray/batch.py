"""Batches of a replica: the columns of some of its steps, as a reader sees them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_specdec.export.arrow import pyarrow
from jax_specdec.export.prompt_columns import prompt_part, prompt_versions
from jax_specdec.export.step_rows import joined_rows
from jax_specdec.export.token_columns import TokenColumns
from jax_specdec.records.batch import FinishReason, PromptRows
from jax_specdec.requests import Request

ENVELOPE = 1 << 16  # more bytes than a schema, a batch's header and the padding of arrays take


@dataclass(frozen=True, slots=True, eq=False)
class ColumnBatch:
    """The tokens that some steps of a replica brought, one row a request.

    Its arrays are views of Ray's object store, where the batch was made on this node: copy what
    shall outlive many batches.

    Attributes:
      rows: a `pyarrow.RecordBatch`, as `jax_specdec.export.step_rows` describes.
      requests: the requests of the rows, in their order.
      replica: the number of the replica; -1 for ends that no replica caused.
    """

    rows: Any
    requests: Sequence[Request]
    replica: int = -1

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator["Part"]:
        return (Part(self, row) for row in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.rows.column("token_id").values)

    @property
    def offsets(self) -> NDArray[np.int32]:
        """[rows + 1] int32: where each row's tokens begin among those of all."""
        offsets: NDArray[np.int32] = self.rows.column("token_id").offsets.to_numpy()
        return offsets

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[tokens] int32, row after row."""
        token_ids: NDArray[np.int32] = self.rows.column("token_id").values.to_numpy()
        return token_ids

    @property
    def positions(self) -> NDArray[np.int64]:
        """[rows] int64, the place of each row's first token in its sequence."""
        positions: NDArray[np.int64] = self.rows.column("position").to_numpy()
        return positions

    @property
    def finish_reasons(self) -> NDArray[np.int8]:
        """[rows] int8 `FinishReason`; 0 where the request goes on."""
        reasons: NDArray[np.int8] = self.rows.column("finish_reason").to_numpy()
        return reasons

    def columns(self) -> TokenColumns:
        """The batch as columns, one row a token."""
        return columns([self])

    def take(self, rows: Sequence[int]) -> "ColumnBatch":
        """The batch with only these rows; a copy."""
        pa = pyarrow()
        taken = self.rows.take(pa.array(list(rows), pa.int64()))
        return ColumnBatch(taken, [self.requests[row] for row in rows], self.replica)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One request's tokens of a batch: a view, like a `Record` of several steps."""

    batch: ColumnBatch
    row: int

    @property
    def request(self) -> Request:
        return self.batch.requests[self.row]

    @property
    def request_id(self) -> str:
        return self.request.id

    @property
    def position(self) -> int:
        """The place of the first token in the sequence; the prompt's tokens are counted."""
        return int(self.batch.positions[self.row])

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[n] int32."""
        return self._values("token_id")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def logprobs(self) -> NDArray[np.float32] | None:
        """[n] float32, of the tokens themselves; None where no request of the batch asked."""
        if self.batch.rows.schema.get_field_index("logprob") < 0:
            return None
        return self._values("logprob")

    @property
    def weights_versions(self) -> NDArray[np.uint32]:
        """[n] uint32, of the weights that made each token."""
        return self._values("weights_version")

    def _values(self, name: str) -> NDArray[Any]:
        begin, end = self.batch.offsets[self.row : self.row + 2]
        values: NDArray[Any] = self.batch.rows.column(name).values.to_numpy()
        return values[begin:end]

    @property
    def prompt(self) -> PromptRows | None:
        """Some of the prompt's logprobs, as `Record.prompt` has them; None where none came.

        The parts come in order, the last before the first token or with it.
        """
        return prompt_part(self.batch.rows, self.row, self.request)

    @property
    def prompt_weights_versions(self) -> NDArray[np.uint32]:
        """[n] uint32, of the weights that made each row of `prompt`."""
        return prompt_versions(self.batch.rows, self.row)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over all tokens so far; None where the request asked for no logprobs."""
        if not self.request.params.num_columns:
            return None
        return float(self.batch.rows.column("cumulative_logprob")[self.row].as_py())

    @property
    def finish_reason(self) -> FinishReason | None:
        reason = int(self.batch.finish_reasons[self.row])
        return FinishReason(reason) if reason else None

    def columns(self) -> TokenColumns:
        """All that came with the tokens: top K, kept sets, drafts."""
        return self.batch.take([self.row]).columns()


def columns(batches: Sequence[ColumnBatch]) -> TokenColumns:
    """The columns of all tokens of some batches, one row a token; of each request in order.

    It copies: afterwards the batches may be dropped.
    """
    requests: Mapping[str, Request] = {
        request.id: request for batch in batches for request in batch.requests
    }
    return joined_rows([batch.rows for batch in batches], requests)


def arrow_bytes(rows: Any) -> NDArray[np.uint8]:
    """A `pyarrow.RecordBatch` as one array of bytes, in Arrow's stream format."""
    pa = pyarrow()
    buffer = pa.allocate_buffer(rows.nbytes + ENVELOPE)
    sink = pa.FixedSizeBufferWriter(buffer)
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return np.frombuffer(buffer, np.uint8)[: sink.tell()]


def unpacked(data: NDArray[np.uint8]) -> Any:
    """The `pyarrow.RecordBatch` of `arrow_bytes`: views of the same memory."""
    pa = pyarrow()
    return pa.ipc.open_stream(pa.py_buffer(data)).read_next_batch()
