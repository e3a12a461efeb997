"""The lane's verdicts, with environments and checks that are stood in for."""

import subprocess

import pytest

from tests.peers import run

PEERS = ["tunix", "maxtext", "sglang_jax", "tpu_inference"]


@pytest.fixture
def lane(monkeypatch):
    """Of tunix no environment can be made, and MaxText's tests fail."""

    def environment(peer, python):
        if peer == "tunix":
            raise subprocess.CalledProcessError(7, ["pip"])
        return f"{python} of {peer}"

    monkeypatch.setattr(run, "newest", lambda: "python")
    monkeypatch.setattr(run, "environment", environment)
    monkeypatch.setattr(run, "check", lambda peer, python: python != "python of maxtext")
    return run.main


@pytest.mark.parametrize(
    ("names", "status", "verdicts"),
    [
        ([], 1, ["NOT RUN", "FAILED", "ok", "ok"]),
        (PEERS[2:], 0, ["ok", "ok"]),
        (["tunix", "sglang_jax"], 0, ["NOT RUN", "ok"]),
        (["tunix"], 3, ["NOT RUN"]),
    ],
)
def test_each_peer_has_a_verdict(lane, capsys, names, status, verdicts):
    """One that fails fails the lane; one that cannot run stops no other."""
    assert lane(names) == status
    lines = capsys.readouterr().out.splitlines()
    count = len(verdicts)
    for peer, verdict, began, ended in zip(
        names or PEERS, verdicts, lines[:count], lines[count:], strict=True
    ):
        assert began.startswith(f"NOT RUN: {peer}: " if verdict == "NOT RUN" else f"RUN: {peer}: ")
        assert ended.startswith(f"{peer}: {verdict}, ")
    if "tunix" in (names or PEERS):
        assert "exit status 7" in lines[0]


def test_without_a_python_and_of_no_peer(lane, monkeypatch):
    assert lane(["nobody"]) == 2
    monkeypatch.setattr(run, "newest", lambda: None)
    assert lane([]) == 3
