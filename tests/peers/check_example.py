"""The example of the peer that is installed, run as a user runs it: one loss, less memory."""

import os
import re
from importlib import metadata

from bench.peers.cases import OF
from tests.support.paths import ROOT
from tests.support.processes import ended

PEERS = {distribution: peer for peer, (distribution, *_) in OF.items()}
LINE = re.compile(
    r"^(.+?) +loss (\d+\.\d{4}),(?: gradient (\d+\.\d{4}),)? (\d+(?:\.\d)?) MB$", re.M
)


def installed():
    """The peer of this environment, which has one."""
    names = {dist.name.lower().replace("_", "-") for dist in metadata.distributions()}
    (peer,) = (PEERS[name] for name in names & PEERS.keys())
    return peer


def test_the_loss_is_the_peer_s_and_takes_less_memory():
    path = ROOT / "examples" / f"in_{installed()}.py"
    code = (
        "import sys, runpy, bench.peers.stand_ins; runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    done = ended("-c", code, path, cwd=ROOT, env=os.environ | {"XLA_FLAGS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    (_, *losses, theirs), (name, *own_losses, ours) = LINE.findall(done.stdout)
    assert name == "installed"
    assert own_losses == losses
    assert float(ours) < 0.6 * float(theirs)
    assert re.search(r"^in the place of \w+\.", done.stdout, re.MULTILINE)
    assert len(path.read_text().splitlines()) < 120
    page = (ROOT / "docs" / f"{path.stem.removeprefix('in_')}.md").read_text()
    shown = re.search(r"```text\n((?:.*loss.*\n)+)", page)
    assert shown is not None
    assert [one[0] for one in LINE.findall(shown[1])] == [
        one[0] for one in LINE.findall(done.stdout)
    ]
