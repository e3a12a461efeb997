"""Cycles from a compiler's listing, on one that was written by hand; what breaks a limit; the check
in parts, and what it keeps. Nothing is compiled here.
"""

import json
from dataclasses import replace

import pytest

from bench import aot, aot_tpu
from bench.tpu import bundles, grid, tiles
from bench.tpu.loops import looped
from bench.tpu.programs import Compiled, reads
from bench.tpu.steps import Step, collectives, searched
from pallas_kernels.testing.shapes import Shape

LISTING = """
LB: loop body
     0   :  { %s1 = smov 0 }
   0x1   :  {}
   0x2 LB: > { %p1_p0 = scmp.ge.s32.totalorder %s5_s1, %s2_s3 /* loop exit test */ }
   0x3 LB: >> { %v1_v0 = vadd.f32 1.0, %v7_v4 }
   0x4   :  {}
   0x5   : >> { %p2_p1 = scmp.ge.s32.totalorder %s6_s1, 8 /* loop exit test */ }
   0x6   : > { %s1 = smov 1 }
   0x7   : >> { %s1 = smov 1 }
   0x8 LB: >> { %p3_p1 = scmp.ge.s32.totalorder (%p2_p1), %s6_s1, 20 /* loop exit test */ }
   0x9   :  { %s1 = smov 0 }
"""


def test_bundles_times_turns():
    """An unmarked bundle is of the loop it stands in; so are a loop's last ones."""
    loops = bundles.read(LISTING)
    (outer,) = loops.inner
    assert (loops.bundles, outer.bundles) == (3, 2)
    assert [(one.bundles, one.turns) for one in outer.inner] == [(4, 8), (1, 20)]
    assert outer.turns is None
    assert loops.cycles(3) == 3 + 3 * (2 + 4 * 8 + 20)


FINE = Compiled("v5e", "kernel", 64, 131_072, 0, "bfloat16", 30_000, 5.0, 0.5, 0, 2)
V6E = {"chip": "v6e"}
WIDE, ONE = V6E | {"rows": 256}, V6E | {"rows": 1, "k": 20}


@pytest.mark.parametrize(
    ("changes", "plain", "kept", "said"),
    [
        ({}, None, 29_000, None), ({}, None, 28_000, "more cycles"),
        ({"cycles": 41_000}, None, 41_000, "bytes' time"), ({"reads": 3}, None, 30_000, "read"),
        ({"temporaries": 2**24}, None, 30_000, "are written"),
        ({"seconds": 61.0}, None, 30_000, "GB to compile"),
        (V6E, 60_000, 30_000, None), (V6E, 59_000, 30_000, "2.0x are wanted"),
        (WIDE, 47_000, 30_000, None), (WIDE, 46_000, 30_000, "1.55x are wanted"),
        (ONE, 56_000, 30_000, None), (ONE, 55_000, 30_000, "1.85x are wanted"),
        (ONE | {"rows": 2048}, 419_000, 30_000, "14.0x are wanted"),
    ],
)  # fmt: skip
def test_limits(changes, plain, kept, said):
    """The control for each: a program that breaks it."""
    one = replace(FINE, **changes)
    other = plain and replace(one, way="plain", cycles=plain)
    found = aot_tpu.faults(one, other, kept)
    assert found == [] if said is None else said in found[0]


STEP = """
  %p.1 = f32[16,8192]{1,0:T(8,128)} parameter(0)
  %small.2 = (f32[16,128]{1,0:T(8,128)}, s32[16,128]{1,0:T(8,128)}) sort(%a.1, %b.1), dimensions={1}
  %large.3 = f32[16,8192]{1,0:T(8,128)} sort(%p.1), dimensions={1}
  %top.4 = (f32[16,20]{1,0}, s32[16,20]{1,0}) custom-call(%p.1), custom_call_target="TopK"
  %all.5 = f32[4,16,43]{2,1,0:T(8,128)} all-gather(%c.1), dimensions={0}
  %two.6 = (f32[16]{0}, f32[16]{0}) all-reduce-start(%d.1, %e.1), to_apply=%add
"""


READS = """
ENTRY %main (x: bf16[9,700]) -> bf16[9] {
  %x.1 = bf16[9,700]{1,0} parameter(0)
  %start.2 = ((bf16[9,700]{1,0}, s32[9]{0}), bf16[9]{0}) custom-call-update(%s.1, %x.1)
  %done.3 = bf16[9]{0} custom-call-done(%start.2)
  %copy.4 = bf16[9,700]{1,0} copy(%x.1)
  ROOT %sum.5 = bf16[9]{0} fusion(%copy.4, %done.3), kind=kLoop
}
"""


def test_operations_that_read_the_logits_or_a_copy():
    """An asynchronous one counts once: its end reads no logits."""
    assert reads(READS, 9, 700) == 3


def test_what_a_step_does_with_the_vocabulary():
    """Sorts and searches of whole columns are found, those of few candidates are not."""
    assert searched(STEP, 8192) == [
        "sort %large.3 of f32[16,8192]",
        "custom-call %top.4 of f32[16,8192]",
    ]
    assert collectives(STEP) == {"all-gather f32[4,16,43]": 1, "all-reduce (f32[16], f32[16])": 1}
    fine = Step("v6e", 4, 32_768, "a step", 1, collectives(STEP), [], [], 1.0)
    assert aot_tpu.step_faults(fine) == []
    gathered = replace(fine, kernels=0, collectives={"all-gather f32[16,32768]": 1})
    assert len(aot_tpu.step_faults(gathered)) == 2
    assert len(aot_tpu.step_faults(replace(fine, searched=searched(STEP, 8192)))) == 2
    assert len(aot_tpu.step_faults(replace(fine, looped=looped(LOOPS, 8192, 20)))) == 1


LOOPS = """
%fused (p: f32[16,8192]) -> f32[16] {
  %p.1 = f32[16,8192]{1,0} parameter(0)
  ROOT %largest.2 = f32[16]{0} reduce(%p.1, %c.3), dimensions={1}
}

%body (t: (s32[], f32[16,8192])) -> (s32[], f32[16,8192]) {
  %t.1 = (s32[], f32[16,8192]{1,0}) parameter(0)
  %x.2 = f32[16,8192]{1,0} get-tuple-element(%t.1), index=1
  %one.3 = f32[1,1]{1,0} dynamic-slice(%x.2, %i.1, %j.1)
  %found.4 = f32[16]{0} fusion(%x.2), kind=kLoop, calls=%fused
}

%less (t: (s32[], f32[16,8192])) -> pred[] {
  %bound.1 = s32[]{:T(128)} constant(20)
  ROOT %lt.2 = pred[] compare(%i.2, %bound.1), direction=LT
}

ENTRY %main (x: f32[16,8192]) -> f32[16] {
  %w.1 = (s32[], f32[16,8192]{1,0}) while(%t.9), condition=%less, body=%body
}
"""


def test_cycles_of_operations_times_turns_of_loops(monkeypatch, capsys):
    said = '={"bundle_analysis_data":{"bundles":"9","estimated_cycles":"7"}}'
    text = LOOPS.replace("kind=kLoop", f"backend_config{said}")
    assert tiles.cycles(text, 3) == 20 * 7
    assert tiles.cycles(text.replace("constant(20)", "parameter(0)"), 3) == 3 * 7

    monkeypatch.setattr(tiles.os, "environ", {})
    for most, status in ((110, 0), (111, 1)):
        counted = {None: 100, 128: most}
        monkeypatch.setattr(tiles, "step_cycles", lambda slots, rows, tile, c=counted: c[tile])
        assert tiles.main() == status
    assert "32 slots of 4 rows: 111 cycles in tiles, 100 without: 1.11x" in capsys.readouterr().out


PART = ["--chip", "v6e", "--shape", "64 131072 0 float32"]


KEPT = {"kernel": 1000, "xla": 2000, "plain": 3000}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Stands in for the compiler: kept cycles, or what a test puts there; and its calls."""
    cycles, calls = dict(KEPT), []
    file = tmp_path / "cycles.json"
    file.write_text(json.dumps({f"v6e {way} {PART[3]}": count for way, count in KEPT.items()}))

    def compile_one(chip, way, shape: Shape):
        calls.append(grid.name(chip, way, shape))
        if cycles[way] is None:
            raise RuntimeError("no room in VMEM")
        size = (shape.rows, shape.vocabulary, shape.k, shape.dtype)
        return Compiled(chip, way, *size, cycles[way], 1.0, 0.5, 0, 2)

    monkeypatch.setattr(aot_tpu, "compiled", compile_one)
    monkeypatch.setattr(aot_tpu, "KEPT", file)
    monkeypatch.setattr(aot_tpu.importlib.util, "find_spec", lambda name: name)
    return cycles, calls


def test_a_check_of_a_part(compiled, capsys):
    """It holds; and does not where a way has more cycles than are kept, or does not compile."""
    cycles, calls = compiled
    assert aot.main(["tpu", "--check", *PART]) == 0
    assert len(calls) == 3
    cycles["kernel"] = 1060
    assert aot.main(["tpu", "--check", *PART]) == 1
    assert aot.main(["tpu", "--check", "--keep", *PART]) == 1
    assert aot.main(["tpu", "--check", *PART]) == 0
    cycles["kernel"] = None
    capsys.readouterr()
    assert aot.main(["tpu", "--check", *PART]) == 1
    assert "FAILED no room in VMEM" in capsys.readouterr().out


def test_every_program_has_cycles_to_compare_with():
    names = {grid.name(*one) for one in grid.programs(False)}
    assert set(aot_tpu.kept_cycles()) == names
    later = json.loads(aot_tpu.KEPT.with_name("cycles-0.0.52.json").read_text())
    assert {grid.name(*one) for one in grid.programs(True)} <= {*later} <= names


def test_a_later_libtpu_has_cycles_of_its_own(compiled, monkeypatch):
    cycles, _ = compiled
    own = aot_tpu.KEPT.with_name("cycles-0.0.52.json")
    own.write_text(json.dumps({f"v6e kernel {PART[3]}": 1100}))
    cycles["kernel"] = 1150
    for version, status in (((0, 0, 42), 1), ((0, 0, 52), 0), ((0, 1, 0), 0), ((), 1)):
        monkeypatch.setattr(aot_tpu, "libtpu_version", lambda version=version: version)
        assert aot.main(["tpu", "--check", *PART]) == status
    monkeypatch.setattr(aot_tpu, "libtpu_version", lambda: (0, 0, 53))
    before = aot_tpu.KEPT.read_text()
    cycles["kernel"] = 1080
    aot.main(["tpu", "--keep", *PART])
    assert json.loads(own.read_text())[f"v6e kernel {PART[3]}"] == 1080
    assert aot_tpu.KEPT.read_text() == before
