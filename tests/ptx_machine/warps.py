"""What instructions compute of whole warps: the first source is [warps, 32]."""

import functools
from collections.abc import Callable

import numpy as np

from .arithmetic import Operation, largest
from .parser import PtxError
from .threads import WARP, Hardware, Threads

ALL_LANES = 0xFFFFFFFF
LANE = np.arange(WARP, dtype=np.uint32)


class MissingLane(PtxError):
    """A warp instruction is not executed by all lanes that its mask names: it waits for them."""


def check(threads: Threads, members: np.ndarray) -> None:
    """Every lane of the warps that run must be here: Mosaic GPU names all lanes."""
    active = threads.active()
    if ((members[active] if members.ndim else members) != ALL_LANES).any():
        raise PtxError("the member mask does not name all lanes: not known to the machine")
    if threads.mask is not None:
        warps = active.reshape(-1, WARP)
        if (warps.any(axis=1) != warps.all(axis=1)).any():
            raise MissingLane("a lane that the member mask names is not here")


def shuffle(whole: int, source: Callable[[np.ndarray], np.ndarray]) -> Operation:
    """Each lane gets another's word; whole: the clamp of a shuffle that crosses the whole warp."""

    def shuffled(x: np.ndarray, by: np.ndarray, clamp: np.ndarray, _: np.ndarray) -> np.ndarray:
        if by.ndim or by >= WARP or clamp.ndim or clamp != whole:
            raise PtxError("only shuffles of whole warps by a constant are known to the machine")
        return x[:, source(by)]

    def spread(values: list[np.ndarray], masks: list[np.ndarray]) -> np.ndarray:
        return shuffled(masks[0].reshape(-1, WARP), *values[1:]).reshape(-1)

    return Operation("w", "wWWW", shuffled, spread)


def reduction(reduce: Callable[[np.ndarray], np.ndarray]) -> Operation:
    """Of the words [warps, 32] a word each [warps]; undefined where any is."""

    def spread(_: list[np.ndarray], masks: list[np.ndarray]) -> np.ndarray:
        some = (masks[0].reshape(-1, WARP) != 0).any(axis=1)
        return np.repeat(np.where(some, np.uint32(ALL_LANES), np.uint32(0)), WARP)

    return Operation("w", "wW", lambda x, _: np.repeat(reduce(x), WARP), spread)


def elect(hardware: Hardware, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of the lane that is chosen, and whether it is this one."""
    leader = np.uint32(hardware.leader % WARP)
    return np.full(members.shape, leader), np.broadcast_to(leader == LANE, members.shape)


OPERATIONS = {
    "shfl.sync.bfly.b32": shuffle(31, lambda by: LANE ^ by),
    "shfl.sync.idx.b32": shuffle(31, lambda by: 0 * LANE + by),
    "shfl.sync.up.b32": shuffle(0, lambda by: np.where(by <= LANE, LANE - by, LANE)),
    "redux.sync.max.s32": reduction(lambda x: x.view(np.int32).max(axis=1).view(np.uint32)),
    "redux.sync.add.s32": reduction(lambda x: x.sum(axis=1, dtype=np.uint32)),
    "redux.sync.max.NaN.f32": reduction(lambda x: functools.reduce(largest("f32"), x.T)),
    "elect.sync": Operation("wp", "W", elect, of_hardware=True),
}
