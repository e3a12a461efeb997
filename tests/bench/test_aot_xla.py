"""How `bench.aot_xla` counts launches, and when a limit is broken."""

import pytest

from bench import aot_xla
from pallas_kernels.testing.shapes import Shape

pytestmark = pytest.mark.fast

PROGRAM = """HloModule jit_call

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %a = f32[8]{0} add(%p, %p)
}

%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {
  %c = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%c), index=1
  %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused
  %z = f32[8]{0} fusion(%y), kind=kLoop, calls=%fused
  ROOT %t = (s32[], f32[8]{0}) tuple(%c, %z)
}

%condition (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] fusion(%c), kind=kLoop, calls=%fused
}

ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %sorted = (f32[8]{0}, s32[8]{0}) sort(%x), dimensions={0}
  %nothing = f32[8,0]{1,0} copy(%x)
  %first = (s32[], f32[8]{0}) tuple(%x)
  ROOT %w = (s32[], f32[8]{0}) while(%first), condition=%condition, body=%body TRIPS
}
"""


def test_a_loops_operations_count_as_often_as_it_turns():
    assert aot_xla.launches(PROGRAM.replace("TRIPS", ""), trips=6) == 1 + 6 * 3
    known = ', backend_config={"known_trip_count":{"n":"4"}}'
    assert aot_xla.launches(PROGRAM.replace(" TRIPS", known), trips=6) == 1 + 4 * 3


def test_each_limit_can_be_broken():
    fine = {
        "plain_launches": 13,
        "launches": 34,
        "temporaries": 1_126_400,
        "kernels": 0,
        "reads": 1,
    }
    for more in ({}, {"launches": 35}, {"temporaries": 1_126_401}, {"kernels": 1}, {"reads": 2}):
        found = aot_xla.targets_of(Shape(512, 1000, 5, "bfloat16"), **fine | more)
        assert [one.verdict for one in found].count("MISSED") == len(more)
