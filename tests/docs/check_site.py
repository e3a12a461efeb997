"""A dead link, anchor or reference fails the documentation site: pytest tests/docs/check_site.py

Named so that the ordinary test run does not collect it: it needs the `docs` extra.
"""

import os
import subprocess
import sys

import pytest

from tests.support.pages import DOCS
from tests.support.paths import ROOT

GOOD = "# A page\n\n[itself](index.md#a-page) and {py:obj}`ipc.RingReader`\n\n"
SHOWS = "```{eval-rst}\n.. automodule:: ipc\n   :imported-members:\n```\n"
REST = "```{eval-rst}\n.. autodata:: ipc.WaitPolicy\n```\n"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (REST, None),
        ("[a](gone.md)", "cross-reference target not found: 'gone.md'"),
        ("[a](index.md#gone)", "gone"),
        ("{py:obj}`ipc.Gone`", "py:obj reference target not found: ipc.Gone"),
        ("", "no page shows ipc.WaitPolicy, which its door lists"),
    ],
)
def test_a_wrong_page_fails(tmp_path, more, said):
    """A site of one page, with the settings of ours."""
    (tmp_path / "index.md").write_text(GOOD + SHOWS + more)
    conf = (DOCS / "conf.py").read_text()  # one door is enough here
    (tmp_path / "conf.py").write_text(f'{conf}\nDOORS = ("ipc",)\n')
    for name in ("linked_tests.py", "_static/pages.css"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((DOCS / name).read_text())
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", tmp_path, tmp_path / "o"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if said is None:
        assert (done.returncode, done.stderr) == (0, "")
        html = (tmp_path / "o/index.html").read_text("utf-8")
        assert "sequence number: 0, 1, 2" in html  # what stands before a colon is no type
        assert "Alias for field number" not in html
    else:
        assert done.returncode
        assert said in done.stderr
