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
