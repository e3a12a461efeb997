"""`jax-specdec doctor`: it lists rings, and removes those of dead processes alone."""

import os

import pytest

from ipc import RingReader, RingWriter, doctor
from jax_specdec.cli.main import main


@pytest.mark.fast
def test_doctor_lists_a_living_ring_and_leaves_it_alone(capsys, monkeypatch):
    everything = doctor.find_ring_files  # other tests, running now, keep their leftovers
    monkeypatch.setattr(
        doctor,
        "find_ring_files",
        lambda: [file for file in everything() if file.creator.pid == os.getpid()],
    )
    with RingReader.create(1, 64) as ring:
        assert main(["doctor", "--remove"]) == 0
        assert ring.name.strip("/") in capsys.readouterr().out
        RingWriter.attach(ring.name).close()
