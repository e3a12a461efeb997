"""What `bench.aot` and `bench.aot_xla` read and count: a listing written by hand, and limits."""

import json

import pytest

from bench import aot_xla
from bench.gpu import estimates, events, machine_code, model
from pallas_kernels.backends.mosaic_gpu.schedule import (
    CLUSTER,
    PROGRAMS_AT_ONCE,
    choose_read_schedule,
    choose_schedule,
)
from pallas_kernels.testing import chips
from pallas_kernels.testing.shapes import Shape

NONE = 7  # no scoreboard
CHIP = model.chip("H100")


def line(address, text, stall=1, sets=NONE, reads=NONE, waits=0):
    """An instruction as nvdisasm prints it, with its control code."""
    upper = (waits << 11 | reads << 8 | sets << 5 | stall) << 41
    lower = f"        /*{address:04x}*/    {text} ;    /* 0x{0:016x} */"
    return f"{lower}\n        /* 0x{upper:016x} */"


LISTING = "\n".join(
    [
        line(0x00, "LDG.E R3, desc[UR4][R2.64]", sets=0),
        line(0x10, "IADD3 R4, R3, 0x1, RZ", stall=5, waits=0b1),
        ".L_x_0:",
        line(0x20, "FADD R5, R5, R4", stall=4),
        line(0x30, "MUFU.EX2 R6, R5", sets=1),
        line(0x40, "@!P0 FMUL R7, R6, R6", stall=2, waits=0b10),
        line(0x50, "@P1 BRA `(.L_x_0)", stall=5),
        line(0x60, "EXIT", stall=5),
        ".L_x_1:",
        line(0x70, "BRA `(.L_x_1)"),
    ]
)
CODE = machine_code.parse(LISTING)
LOOP = machine_code.Loop(2, 6)


def launched(code=CODE, programs=132, size=0.0, turns=10.0):
    return model.Launched(code, 32, programs, size, lambda code, loop: turns)


def test_reading_machine_code():
    """Control codes and the loop are read; padding behind the end, a branch to itself, is not."""
    names = "LDG.E IADD3 FADD MUFU.EX2 FMUL BRA EXIT"
    assert [x.name for x in CODE.instructions] == names.split()
    assert CODE.loops == (LOOP,)
    assert CODE.names(LOOP) == ("FADD", "MUFU.EX2", "FMUL", "BRA")
    load, add, *_ = CODE.instructions
    assert (load.stall, load.sets, load.waits) == (1, (0,), ())
    assert (add.stall, add.sets, add.waits) == (5, (), (0,))
    assert machine_code.parse(LISTING.replace("@P1 BRA `(.L_x_0)", "NOP")).loops == ()


def test_events_charge_the_start_the_queue_and_the_tail():
    alone = model.chain(CODE, model.structure(CODE, lambda *_: 10), CHIP) / CHIP.clock
    one = events.seconds(launched(programs=1), 0, 1, CHIP)
    assert one == pytest.approx(alone)
    # Sixteen programs fit on a multiprocessor, one more waits for a place.
    full = 132 * 16
    many, more = (events.seconds(launched(programs=n), 0, n, CHIP) for n in (full, full + 1))
    assert many > alone
    assert more == pytest.approx(many + one, rel=0.2)
    # A queue of bytes takes as long as they do, and a start and a turn more.
    size = 3.35e7
    bound = events.seconds(launched(programs=full, size=size), 0, full, CHIP)
    assert 0 < bound - size / (CHIP.bandwidth * CHIP.efficiency) < 2 * alone


def test_a_slower_kernel_breaks_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "FOLDER", tmp_path)

    def of(turns):
        time = model.time(launched(turns=turns), CHIP)
        return estimates.Estimate(time, time, 3e-6)

    estimates.accept({"a": of(1000)})
    assert json.loads((tmp_path / "limits.json").read_text()) == {
        "a": round(of(1000).total * 1e6, 1)
    }
    assert estimates.slower("a", of(1000)) == estimates.slower("a", of(900)) == []
    assert "the limit" in estimates.slower("a", of(1100))[0]
    assert "no limit" in estimates.slower("b", of(1000))[0]


def test_limits_are_those_of_the_newest_jax_that_is_not_later(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "FOLDER", tmp_path)
    assert estimates.limits_file((0, 13, 0)).name == "limits.json"
    for version in ("0.9", "0.12", "0.14"):
        (tmp_path / f"limits-{version}.json").write_text("{}")
    names = {
        (0, 8, 9): "limits.json",
        (0, 11, 2): "limits-0.9.json",
        (0, 13, 1): "limits-0.12.json",
        (0, 14, 0): "limits-0.14.json",
    }
    assert {version: estimates.limits_file(version).name for version in names} == names


def test_chips_differ_by_their_own_figures():
    """Half of the lanes take two clocks; the same work takes longer where the clock is slower."""
    assert model.chip("A100").pipes["fma"] == 2 * model.chip("H100").pipes["fma"] == 2
    assert model.chip("L40S").most_warps == 48
    size = 3.35e9
    times = {name: model.time(launched(size=size), model.chip(name)) for name in chips.GPUS}
    assert times["H200"].memory == pytest.approx(size / (0.9 * 4.8e12))
    assert times["H200"].latency == times["H100"].latency < times["A100"].latency


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("vocabulary", [32_000, 50_257, 128_256, 151_936])
def test_programs_of_edges_have_places_of_their_own(rows, vocabulary):
    """Else a few programs would run alone after the others: a second round of a few rows."""
    for dtype in ("bfloat16", "float32"):
        fixed = choose_read_schedule(rows, vocabulary, dtype)
        assert fixed.edges
        places = rows * fixed.programs
        assert places <= PROGRAMS_AT_ONCE or fixed.programs <= CLUSTER
        assert places + rows > PROGRAMS_AT_ONCE or fixed.splits == fixed.num_steps
        assert rows <= 16 or choose_schedule(rows, vocabulary, 20, dtype).programs <= CLUSTER


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
        "reads": 1,
    }
    for more in ({}, {"launches": 35}, {"temporaries": 1_126_401}, {"reads": 2}):
        found = aot_xla.targets_of(Shape(512, 1000, 5, "bfloat16"), **fine | more)
        assert [one.verdict for one in found].count("MISSED") == len(more)
