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


def build(folder, text):
    """The exit status and the warnings of a site of one page, with the settings of ours."""
    folder.mkdir()
    (folder / "index.md").write_text(text)
    conf = (DOCS / "conf.py").read_text()  # one door is enough here
    (folder / "conf.py").write_text(f'{conf}\nDOORS = ("ipc",)\n')
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", folder, folder / "out"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stderr


def test_a_good_page_is_built(tmp_path):
    shown = ".. autodata:: ipc.WaitPolicy\n"
    assert build(
        tmp_path / "good",
        GOOD + SHOWS + SHOWS.replace(".. automodule:: ipc\n   :imported-members:\n", shown),
    ) == (0, "")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[a](gone.md)", "cross-reference target not found: 'gone.md'"),
        ("[a](index.md#gone)", "gone"),
        ("{py:obj}`ipc.Gone`", "py:obj reference target not found: ipc.Gone"),
        ("", "no page shows ipc.WaitPolicy, which its door lists"),
    ],
)
def test_a_wrong_page_fails(tmp_path, wrong, said):
    status, warnings = build(tmp_path / "wrong", GOOD + SHOWS + wrong)
    assert status != 0
    assert said in warnings
