"""The machine on programs that count together: atomic additions, prefix sums, pairs compared."""

import numpy as np
import pytest

from .parser import PtxError
from .programs import THREADS, run

# Each thread whose word is not 0 takes a place, and writes its number there.
PLACES = """
	mov.b64 	%rd6, __dynamic_shmem__0;
	setp.ne.b32 	%p1, %r1, 0;
	@%p1 bra 	$READY;
	st.shared.b32 	[%rd6], 0;
$READY:
	bar.sync 	0;
	ld.global.b32 	%r2, [%rd4];
	mov.b32 	%r9, -1;
	setp.eq.b32 	%p2, %r2, 0;
	@%p2 bra 	$DONE;
	atom.shared.add.u32 %r9, [%rd6], 1;
$DONE:
	st.global.b32 	[%rd5], %r9;
	bar.sync 	0;
	ld.shared.b32 	%r3, [%rd6];
	ret;
"""


@pytest.mark.parametrize("leader", [0, 5, 31])
def test_atomic_additions_give_every_thread_a_place(leader):
    """In whatever order; the order is the hardware's choice."""
    wanted = np.random.default_rng(0).random(THREADS) < 0.3
    out = run(PLACES, wanted.astype(np.uint32), leader=leader).view(np.int32)
    assert (out[~wanted] == -1).all()
    assert sorted(out[wanted]) == list(range(wanted.sum()))
    if leader:
        assert (np.diff(out[wanted]) < 0).any()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bar.sync 	0;\n	ld.global", "ld.global", "added to without a barrier after a store"),
        ("bar.sync 	0;\n	ld.shared", "ld.shared", "loaded without a barrier after an atomic"),
        (
            "ret",
            "st.shared.b32 	[%rd6], 7;\n	ret",
            "stored to without a barrier after a load",
        ),
        ("st.shared.b32 	[%rd6], 0", "st.shared.b32 	[%rd6+4], 0", "was never written"),
        ("[%rd6], 1", "[%rd6], %r20", "never written"),
    ],
)
def test_unordered_additions_are_reported(old, new, message):
    assert PLACES.count(old) == 1
    with pytest.raises(PtxError, match=message):
        run(PLACES.replace(old, new), np.ones(THREADS, np.uint32))


def test_a_prefix_sum_of_a_warp():
    """Shuffles upward, and a sum over the warp in one instruction."""
    steps = "".join(
        f"""
	shfl.sync.up.b32 	%r3, %r2, {distance}, 0, -1;
	setp.lt.u32 	%p1, %r8, {distance};
	selp.b32 	%r3, 0, %r3, %p1;
	add.s32 	%r2, %r2, %r3;"""
        for distance in (1, 2, 4, 8, 16)
    )
    body = f"""
	and.b32 	%r8, %r1, 31;
	ld.relaxed.gpu.global.b32 	%r2, [%rd4];
	redux.sync.add.s32 	%r9, %r2, -1;{steps}
	shl.b32 	%r9, %r9, 16;
	or.b32 	%r2, %r2, %r9;
	st.global.b32 	[%rd5], %r2;
	ret;
"""
    values = np.random.default_rng(1).integers(0, 9, THREADS).astype(np.uint32)
    warps = values.reshape(4, 32)
    expected = np.cumsum(warps, axis=1) | warps.sum(axis=1, keepdims=True) << 16
    np.testing.assert_array_equal(run(body, values), expected.reshape(-1))
    with pytest.raises(PtxError, match="only shuffles of whole warps"):
        run(body.replace("4, 0, -1", "4, 31, -1"), values)


def test_comparisons_of_pairs():
    """A predicate for each half, the lower one first."""
    body = """
	ld.global.b32 	%r2, [%rd4];
	mov.b32 	%r3, 0;
	setp.eq.f16x2 	%p1|%p2, %r2, %r3;
	selp.b32 	%r4, 1, 0, %p1;
	selp.b32 	%r5, 2, 0, %p2;
	or.b32 	%r4, %r4, %r5;
	popc.b32 	%r6, %r2;
	shl.b32 	%r6, %r6, 8;
	or.b32 	%r4, %r4, %r6;
	st.global.b32 	[%rd5], %r4;
	ret;
"""
    halves = np.array([0.0, -0.0, 1.0, np.nan], np.float16).view(np.uint16).astype(np.uint32)
    values = np.tile((halves[:, None] << 16 | halves[None]).reshape(-1), 8)
    low, high = values & 0xFFFF, values >> 16
    zero = [(half & 0x7FFF) == 0 for half in (low, high)]
    expected = zero[0] | zero[1] * 2 | np.bitwise_count(values).astype(np.uint32) << 8
    np.testing.assert_array_equal(run(body, values), expected)
