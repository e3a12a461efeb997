"""The training script's corpus is the shipped weights'. `.ci/heavy training` checks the rest."""

from jax_specdec.device.model import load_checkpoint, tiny_weights_path
from tests.support.run_examples import EXAMPLES


def test_shipped_weights_come_from_the_shipped_list(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import tiny_corpus

    entries = tiny_corpus.read_list(EXAMPLES / "tiny_corpus.txt")
    _, _, metadata = load_checkpoint(tiny_weights_path())
    assert metadata["corpus"] == tiny_corpus.digest(entries)
    assert {e.split for e in entries} == set(tiny_corpus.SPLITS)
    assert len({e.path for e in entries}) == len(entries)
