"""What a release needs: dated changes, pinned actions, addresses, and a page of what passed."""

import re
import tomllib

import pytest

from tests.support import compatibility
from tests.support.paths import ROOT

pytestmark = pytest.mark.fast

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_changelog_has_a_dated_section_for_the_version():
    changes = (ROOT / "CHANGELOG.md").read_text()
    version = re.escape(PROJECT["version"])
    assert re.search(rf"^## {version} - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE)
    assert changes.index("## Unreleased") < changes.index(f"## {PROJECT['version']}")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit(path):
    uses = re.findall(r"uses: (\S+)(.*)", path.read_text())
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


def test_the_upload_has_no_password_and_no_other_rights():
    text = (ROOT / ".github/workflows/publish.yml").read_text()
    build, _, publish = text.partition("\n  publish:\n")
    assert "id-token: write" in publish
    assert "id-token" not in build
    assert "environment: pypi" in publish
    assert "if: github.ref_type == 'tag'" in publish
    assert not re.search(r"password:|secrets\.", text)


def test_the_project_says_where_it_lives():
    assert {"Repository", "Documentation", "Changelog", "Issues"} == {*PROJECT["urls"]}
    classifiers = [x for x in PROJECT["classifiers"] if x.startswith("Programming Language")]
    versions = re.findall(r"3\.\d\d", (ROOT / "noxfile.py").read_text().partition("PYTHONS")[2])
    assert [x.rpartition(" ")[2] for x in classifiers] == versions[: len(classifiers)]


def test_the_page_of_what_passed_is_written_from_what_is_kept():
    assert compatibility.PAGE.read_text() == compatibility.page()
    rows = compatibility.entries()
    assert {one["what"] for one in rows} >= {"the wheel in an empty environment"}
    assert all(f"| {one['python']} | {one['jax']} |" in compatibility.page() for one in rows)
