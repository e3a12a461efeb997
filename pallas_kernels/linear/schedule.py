"""How much of the logits exists at a time: a few percent of them, or all if they are few.

Three ways, for R rows, V columns of the head on this device, and K:

    one block     few logits: the product as it is, then the read of `topk_logprobs`
    row blocks    many rows and a large K: the same for some rows at a time
    columns       otherwise: a part of the vocabulary at a time, for all rows. The head is read once
"""

from typing import NamedTuple

from pallas_kernels.linear import candidates

_SHARE = 0.05  # of the float32 logits: all temporaries
ENOUGH_BYTES = 96 << 20  # of temporaries: with more, nothing is faster
MANY_ROWS = 1024  # from here on, the share is kept to whatever the logits' size
FEW_BYTES = 48 << 20  # of fewer rows, logits up to here, in float32, are one block; or temporaries
FILLED = 0.82  # of the share, by what is counted here
LEAST_ROOM = 64
NARROWEST = 64  # columns of a product: a multiple of what one step of any matrix unit computes
_NARROW = 128  # columns from which a CPU's products are about as fast as wider ones
LEAST_PIECE = 64  # columns of the backward pass
WIDEST = 512
COPY_BYTES = 2 << 20  # of the head, that a CPU copies and multiplies at a time: they fit a cache
MOST_COLUMNS = 8192
PART_OF_ROWS = 1 << 17  # logits that a CPU reads at a time: they fit a core's cache
ROWS_READ = 8  # rows of a row block that are read at a time
_READ = 8  # bytes of temporaries of their read, for each of their logits


class LinearSchedule(NamedTuple):
    """rows x columns logits exist at a time; `piece` columns are one product.

    rows: R, or those of a row block.
    columns: V, or a multiple of `piece`.
    piece: columns of the head that are copied and multiplied at a time; V: no copy is made.
    part: rows whose logits are read at a time, where columns are fewer than V.
    room: for candidates of a row, behind its top K.
    elsewhere: columns at a time, and of a product, on other platforms than a CPU; 0: the same.
    """

    rows: int
    columns: int
    piece: int
    part: int
    room: int = 64
    elsewhere: int = 0


def choose_linear_schedule(
    rows: int, width: int, hidden: int, itemsize: int, logits_itemsize: int, k: int
) -> LinearSchedule:
    """The way for R = `rows`, V = `width`, H = `hidden`; bytes of a head's, a logit's number."""
    logits = 4 * rows * width
    if (rows < MANY_ROWS and logits <= FEW_BYTES) or width <= NARROWEST:
        return LinearSchedule(rows, width, width, rows)
    share = share_of(rows, logits)
    a_row = width * (4 + (logits_itemsize if logits_itemsize < 4 else 0))
    block = int((0.85 * share - ROWS_READ * _READ * width) / a_row)
    room = room_of(rows, width, hidden, itemsize, k)
    if room is None and block >= 1:
        blocks = -(-rows // min(block, rows))
        return LinearSchedule(-(-rows // blocks), width, width, ROWS_READ)
    sizes = (rows, width, hidden, itemsize, logits_itemsize, k)
    schedule = columns_at_a_time(*sizes, room or LEAST_ROOM)
    return schedule._replace(room=room or LEAST_ROOM, elsewhere=columns_elsewhere(*sizes))


def share_of(rows: int, logits: int) -> float:
    """Bytes of temporaries, for so many of float32 logits."""
    return max(_SHARE * logits, FEW_BYTES if rows < MANY_ROWS else 0)


def schedule_state(rows: int, k: int, room: int) -> int:
    """Bytes of what is known of the rows between two parts."""
    return rows * (8 * (k + room) + 64)


def room_of(rows: int, width: int, hidden: int, itemsize: int, k: int) -> int | None:
    """How much room there can be beside one narrow product; None: too little."""
    if not k:
        return 0
    share = 0.97 * share_of(rows, 4 * rows * width)
    a_column = hidden * itemsize + 4 * rows
    making = min(candidates.ROWS_AT_ONCE, rows) * 12  # bytes, for each that a row has
    most = 8 if width >= 256 * k else 6
    for columns in (_NARROW, NARROWEST):
        for room in (max(LEAST_ROOM, k * eighths // 8) for eighths in range(most, 0, -1)):
            # At the end, the top K are there once more.
            beside = max(columns * a_column, making * (k + room), 8 * rows * k)
            if schedule_state(rows, k, room) + beside <= share:
                return room
    return None


def columns_at_a_time(
    rows: int, width: int, hidden: int, itemsize: int, logits_itemsize: int, k: int, room: int
) -> LinearSchedule:
    """The third way."""
    share = 0.98 * share_of(rows, 4 * rows * width) - schedule_state(rows, k, room)
    share = min(share, ENOUGH_BYTES)
    # The product, and beside it the head's copy; or, afterwards, the logits in other forms.
    forms = 4 if logits_itemsize == 4 else 6 if k else 2
    a_column = 4 * rows + max(hidden * itemsize, forms * rows)
    # Of many rows a product reads so much that its columns need not be few.
    cached = max(1, rows / MANY_ROWS) * COPY_BYTES / (hidden * itemsize)
    worth = PART_OF_ROWS / rows
    most = min(max(WIDEST, worth), width, share / a_column, max(cached, worth))
    columns = NARROWEST
    while 2 * columns <= most:
        columns *= 2
    few = max(16, PART_OF_ROWS // columns)
    part = max(size for size in range(1, min(rows, few) + 1) if rows % size == 0)
    if part >= min(few, rows) // 2:  # the product is read where it is
        return LinearSchedule(rows, columns, columns, part)
    # In a buffer, with rows of padding.
    piece = columns
    while piece > NARROWEST and piece * (a_column + 1.1 * rows * logits_itemsize) > share:
        piece //= 2
    free = share - piece * a_column
    many = max(1, min(WIDEST, width, int(free / 1.1 / (rows * logits_itemsize))) // piece)
    columns = piece * many
    parts = -(-rows // max(16, PART_OF_ROWS // columns))
    return LinearSchedule(rows, columns, piece, -(-rows // parts))


def columns_elsewhere(
    rows: int, width: int, hidden: int, itemsize: int, logits_itemsize: int, k: int
) -> int:
    """The columns of one product where each operation is a launch: as many as the share allows."""
    share = FILLED * share_of(rows, 4 * rows * width) - 16 * rows * k
    a_column = hidden * itemsize + 4 * rows
    a_column += rows * logits_itemsize if logits_itemsize < 4 else 0
    a_column += 2 * rows * logits_itemsize if k else 0  # of the selection
    most = min(MOST_COLUMNS, width, int(min(share, ENOUGH_BYTES) / a_column))
    return max(NARROWEST, most // NARROWEST * NARROWEST)


def backward_piece(rows: int, width: int, hidden: int, itemsize: int) -> int:
    """How many columns the backward pass recomputes at a time."""
    logits = 4 * rows * width
    if (rows < MANY_ROWS and logits <= FEW_BYTES) or width <= NARROWEST:
        return width
    # The head's copy, its gradient, and the logits in a few stages.
    a_column = hidden * (itemsize + 4) + 14 * rows
    share = min(0.9 * _SHARE * logits, ENOUGH_BYTES)
    free = share - 4 * hidden * backward_part(rows, width, hidden)
    piece = max(LEAST_PIECE, min(WIDEST, int(free / a_column)))
    return min(piece // LEAST_PIECE * LEAST_PIECE, width)


def backward_part(rows: int, width: int, hidden: int) -> int:
    """How many rows of hidden's gradient are computed at a time, beside their sum."""
    few = max(LEAST_PIECE, int(0.2 * min(_SHARE * rows * width, ENOUGH_BYTES) / hidden))
    parts = -(-rows // few)
    return -(-rows // parts)
