"""How the TPU kernel cuts rows and vocabulary: units of rows, chunks of columns, stacks.

A vector register holds 8 x 128 words of 32 bits: 8 rows on sublanes, 128 tokens on lanes. Logits of
16 bits come two rows to a word, so that a unit of 16 rows is read as 8 words: even and odd rows.
"""

from dataclasses import dataclass, replace

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.contract.errors import DoesNotFit

LANES = 128
SUBLANES = 8
STEP = 32
CHUNK = 128  # columns that are copied at a time: 16384 tokens
CUT = (STEP, CHUNK)
PAIR = 2  # vectors of a group
PIECE = 128  # vectors of 8 rows that a sweep over groups works on, beside the next ones
SQUARE = (4, 4)  # rows and columns of a cell, of which the one candidate is pushed, if it is one
WORD_COLUMNS = 32  # columns of which a vector of words has the bits
MIB = 1 << 20
BATCH_ROWS = 64  # whose selections are ordered together
REST = 8 << 20  # bytes of VMEM beside the logits, the stacks and the outputs
# Of these the compiler took at most so many for a v4, and once more the stacks for a large top K.
TAKEN = 5 << 18


@dataclass(frozen=True)
class Schedule:
    """One call of the kernel. Hashable."""

    num_logits_rows: int  # N
    num_targets: int  # R
    vocabulary: int  # V
    k: int
    dtype: str
    gathered: bool  # whether row ids choose the rows
    entropy: bool
    masked: bool  # whether words of bits say which tokens are allowed
    sections: int  # parts of a row that have a stack of their own in every lane
    depth: int  # of a stack
    interpreted: bool
    cut: tuple[int, int] = CUT
    grouped: bool = True  # whether groups' maxima and sums are wanted
    rare: bool = True  # False: without what few rows need, to count what all need
    kept: bool = True  # whether the cells' maxima stay in VMEM, where a top K is wanted

    @property
    def is_packed(self) -> bool:
        """Whether a word holds logits of two rows."""
        return self.dtype == "bfloat16"

    @property
    def as_blocks(self) -> bool:
        """Whether Pallas copies a unit's rows, in blocks: XLA widens float16 where it is loaded."""
        return self.dtype == "float16"

    @property
    def block(self) -> int:
        """Columns of a block."""
        return min(2 * self.chunk, self.columns)

    @property
    def width(self) -> int:
        """Tokens that a buffer has room for in each of its rows."""
        multiple = self.block if self.as_blocks else 1
        return -(-self.columns // multiple) * multiple * LANES

    @property
    def halves(self) -> int:
        """Vectors of 8 rows that a vector of words becomes."""
        return 2 if self.is_packed and not self.gathered else 1

    @property
    def unit(self) -> int:
        """Target rows that are worked on at a time."""
        return SUBLANES * self.halves

    @property
    def buffer_rows(self) -> int:
        """Rows of logits in a buffer; of a gathered 16-bit row its neighbour comes along."""
        return 2 * SUBLANES if self.is_packed else SUBLANES

    @property
    def buffer(self) -> tuple[int, int]:
        """The shape of a buffer."""
        return self.buffer_rows // (2 if self.as_words else 1), self.width

    @property
    def as_words(self) -> bool:
        """Whether a buffer holds words of two 16-bit rows each, and not these rows: compilers do
        not agree on how 16 rows of 16 bits lie in VMEM, and libtpu 0.0.52 fills half of each
        vector. The interpreter knows no such view of a buffer.
        """
        return self.is_packed and not self.interpreted

    @property
    def num_units(self) -> int:
        return -(-self.num_targets // self.unit)

    @property
    def batch_units(self) -> int:
        """Units whose selections are ordered together."""
        return min(self.num_units, BATCH_ROWS // self.unit)

    @property
    def batch_rows(self) -> int:
        return self.batch_units * self.unit

    @property
    def num_batches(self) -> int:
        return -(-self.num_units // self.batch_units)

    @property
    def columns(self) -> int:
        """Vectors of 128 tokens of a row, the last of which may be ragged."""
        return -(-self.vocabulary // LANES)

    @property
    def step(self) -> int:
        """Columns that a turn of a loop works on: as many vectors of 8 rows for any dtype."""
        return min(self.cut[0] * 2 // self.halves, self.cut[1])

    @property
    def first_step(self) -> int:
        """Columns that a turn of the first sweep works on: it keeps little in registers."""
        return min(2 * self.step, self.cut[1])

    @property
    def square(self) -> tuple[int, int]:
        """Rows and columns of a cell: in small chunks, less."""
        size = min(SQUARE[0] * SQUARE[1], self.cut[1])
        columns = min(SQUARE[1], max(size // PAIR, 1))
        return size // columns, columns

    @property
    def cell(self) -> int:
        """Columns of the vocabulary in a cell."""
        rows, columns = self.square
        return rows * columns

    @property
    def num_cells(self) -> int:
        return -(-self.columns // self.cell)

    @property
    def cell_maxima(self) -> int:
        """Vectors of a cell's maxima: of all, of its rows, of its columns."""
        return 1 + sum(self.square)

    @property
    def has_maxima(self) -> bool:
        """Whether there is a top K whose cells' maxima stay in VMEM."""
        return self.kept and self.k > 0

    @property
    def piece(self) -> int:
        """Columns that half a turn of a sweep over groups works on."""
        return min(PIECE // self.halves, self.cut[1])

    @property
    def waiting(self) -> int:
        """Groups of 8 rows whose maxima wait while a piece before theirs is worked on."""
        return self.piece // PAIR * self.halves

    @property
    def group_width(self) -> int:
        """Groups that a row of an output has room for: whole vectors."""
        return -(-self.columns // (PAIR * LANES)) * LANES

    @property
    def chunk(self) -> int:
        """Columns that are copied at a time."""
        return min(self.cut[1], self.columns)

    @property
    def num_chunks(self) -> int:
        return -(-self.columns // self.chunk)

    @property
    def slots(self) -> int:
        """Places of a lane's stacks, those of overflow among them."""
        return self.sections * (self.depth + 1)

    @property
    def words(self) -> int:
        """Words of a row's bits: whole vectors."""
        return -(-self.columns // WORD_COLUMNS) * LANES

    @property
    def out_width(self) -> int:
        """Columns of the selection's outputs."""
        return -(-max(self.k, 1) // LANES) * LANES

    @property
    def vmem_bytes(self) -> int:
        """The bytes of VMEM that the kernel may take."""
        return self.own_bytes + REST

    @property
    def needed_bytes(self) -> int:
        """A little more than the kernel takes of VMEM, as compiled."""
        return self.own_bytes + TAKEN + 2 * self.stack_bytes

    @property
    def stack_bytes(self) -> int:
        """The stacks of a batch's rows: of values, and as many of ids."""
        return 4 * self.batch_rows * LANES * self.slots

    @property
    def own_bytes(self) -> int:
        """The logits, the stacks, the outputs and a mask's words."""
        buffers = 1 if self.as_blocks else 2
        size = 2 if self.is_packed else 4
        logits = buffers * self.buffer_rows * self.width * size
        if self.as_blocks:  # as float32, if XLA does not widen them here
            logits += 2 * self.buffer_rows * self.block * LANES * size
        rest = 2 * self.stack_bytes + 4 * self.batch_rows * LANES
        outputs = 2 * 4 * self.batch_rows * (2 * LANES + 2 * self.out_width)
        words = 4 * (2 * self.batch_rows + self.unit) * self.words if self.masked else 0
        return logits + rest + outputs + words + self.group_bytes + self.cell_bytes

    @property
    def cell_bytes(self) -> int:
        """The maxima of a unit's cells."""
        if not self.has_maxima:
            return 0
        return 4 * self.num_cells * self.cell_maxima * self.halves * SUBLANES * LANES

    @property
    def group_bytes(self) -> int:
        """Outputs of groups, and the maxima that wait."""
        if not self.grouped:
            return 0
        outputs = 2 * (2 + self.entropy) * self.batch_rows * self.group_width
        return 4 * (outputs + 2 * self.waiting * SUBLANES * LANES)


def choose_schedule(
    shape: tuple[int, ...],
    num_targets: int,
    k: int,
    dtype: str,
    gathered: bool,
    entropy: bool,
    masked: bool = False,
    interpreted: bool = False,
    cut: tuple[int, int] = CUT,
    grouped: bool = True,
) -> Schedule:
    """The schedule of a call on logits of this shape [N, V]."""
    columns = -(-shape[1] // LANES)
    sections = 1 if k <= 64 else 2 if k <= 128 else 8
    sections = min(sections, -(-columns // cut[1]))
    depth = 4 if k <= 20 else 6 if k <= 64 else 8
    size = (shape[0], num_targets, shape[1], k, dtype)
    schedule = Schedule(
        *size, gathered, entropy, masked, sections, depth, interpreted, cut, grouped
    )
    held = None if interpreted else vmem_bytes()
    return replace(schedule, kept=held is None or schedule.needed_bytes <= held)


def vmem_bytes() -> int | None:
    """The VMEM of a core; None on a host without a TPU that does not say for which one it lowers.

    `jax.sharding.use_abstract_mesh` of a mesh of devices says so.
    """
    try:
        return int(pltpu.get_tpu_info().vmem_capacity_bytes)
    except ValueError:  # a device that jax does not know, as a CPU
        return None


def must_fit(schedule: Schedule) -> None:
    """Raise `DoesNotFit` where the chip is known and its VMEM is less than a schedule may take."""
    held = None if schedule.interpreted else vmem_bytes()
    if held is not None and schedule.needed_bytes > held:
        raise DoesNotFit(
            f"rows of {schedule.vocabulary} {schedule.dtype} logits and a top K of {schedule.k} "
            f"may take {schedule.needed_bytes / MIB:.1f} MiB of VMEM, and this chip has "
            f"{held / MIB:.1f}"
        )
