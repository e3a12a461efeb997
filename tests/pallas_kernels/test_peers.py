"""Other libraries beside the kernels: what fails in them is said, and ends nothing."""

import sys
from types import SimpleNamespace

import jax
import pytest

from jax_specdec.cli import device_report
from pallas_kernels.testing import checks, peers, pieces
from pallas_kernels.testing.shapes import Shape

SHAPE = Shape(2, 600, 3, "float32")
NAME = "log_softmax + tokamax top_k"


def stand_in(monkeypatch, top_k):
    """A library of this top K in place of tokamax."""
    for module in ("tokamax", "tokamax._src.ops.experimental.tpu.topk.api"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(top_k=top_k, __spec__=module))


def told():
    """What the pieces' process says of the peer."""
    lines = []
    piece = pieces.Piece("a peer", lambda: peers.measure(NAME, SHAPE, rehearse=True))
    pieces.run([piece], lines.append)
    return lines[-1]


def test_a_peer_is_timed_behind_its_answer(monkeypatch):
    stand_in(monkeypatch, jax.lax.top_k)
    found = told()
    assert found["ok"]
    assert found["figures"]["us"].keys() == {NAME}
    assert found["figures"]["us"][NAME] > 0


def test_a_peer_with_another_answer_is_not_timed(monkeypatch):
    stand_in(monkeypatch, lambda x, k: (x[:, :k], None))
    assert told()["error"].startswith("AssertionError: Not equal to tolerance")


def test_a_peer_that_has_moved_or_fails(monkeypatch):
    def out_of_memory(x, k):
        raise MemoryError("80 GB")

    stand_in(monkeypatch, out_of_memory)
    assert told()["error"] == "MemoryError: 80 GB"
    monkeypatch.delitem(sys.modules, "tokamax._src.ops.experimental.tpu.topk.api")
    assert told()["error"].startswith("ModuleNotFoundError: ")


@pytest.mark.fast
def test_what_is_not_installed_is_no_piece(monkeypatch):
    def names():
        every = pieces.pieces_of(
            pieces.PEERS, checks.by_name("xla"), "mosaic_tpu", full=False, rehearse=False
        )
        return [one.name for one in every]

    assert peers.missing("mosaic_tpu") == {NAME: "tokamax"}
    assert names() == []
    stand_in(monkeypatch, jax.lax.top_k)
    assert peers.missing("mosaic_tpu") == {NAME: None}
    assert len(names()) == 2
    assert all(name.startswith(f"{device_report.PEERS}: {NAME}: topk_logprobs") for name in names())
