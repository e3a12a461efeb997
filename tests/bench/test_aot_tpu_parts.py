"""The check of the TPU kernel's cycles in parts, and what it keeps; nothing is compiled here."""

import json

import pytest

from bench import aot, aot_tpu
from bench.tpu import grid
from bench.tpu.programs import Compiled
from pallas_kernels.testing.shapes import Shape

ONE = ["--chip", "v6e", "--shape", "64 131072 0 float32"]


KEPT = {"kernel": 1000, "xla": 2000, "plain": 3000}


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Stands in for the compiler: kept cycles, or what a test puts there; and its calls."""
    cycles, calls = dict(KEPT), []
    file = tmp_path / "cycles.json"
    file.write_text(json.dumps({f"v6e {way} {ONE[3]}": count for way, count in KEPT.items()}))

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
    assert aot.main(["tpu", "--check", *ONE]) == 0
    assert len(calls) == 3
    cycles["kernel"] = 1060
    assert aot.main(["tpu", "--check", *ONE]) == 1
    assert aot.main(["tpu", "--check", "--keep", *ONE]) == 1
    assert aot.main(["tpu", "--check", *ONE]) == 0
    cycles["kernel"] = None
    capsys.readouterr()
    assert aot.main(["tpu", "--check", *ONE]) == 1
    assert "FAILED no room in VMEM" in capsys.readouterr().out


def test_every_program_has_cycles_to_compare_with():
    names = {grid.name(*one) for one in grid.programs(False)}
    assert set(aot_tpu.kept_cycles()) == names
    assert {grid.name(*one) for one in grid.programs(True)} <= names
