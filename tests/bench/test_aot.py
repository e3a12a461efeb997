"""What `bench.aot` reads in machine code."""

import pytest

from bench.gpu import sass

pytestmark = pytest.mark.fast

LISTING = """
.L_x_0:
        /*0100*/                   LD.E.128 R4, desc[UR4][R2.64] ;
        /*0110*/                   MUFU.EX2 R5, R5 ;
        /*0120*/              @!P0 BRA `(.L_x_0) ;
        /*0130*/                   EXIT ;
.L_x_1:
        /*0140*/                   BRA `(.L_x_1);
"""


def test_reading_machine_code():
    """The loop is found; the padding after the end, a branch to itself, is not one."""
    assert sass.loops(LISTING) == (sass.Loop(3, 1, 1),)
    assert sass.loops(LISTING.replace("BRA `(.L_x_0)", "NOP")) == ()
