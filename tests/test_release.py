"""What a release needs: dated changes, pinned actions, addresses, and a page of what passed."""

import re
import shutil
import subprocess
import tomllib

import pytest

from tests.support import compatibility
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_the_changelog_has_a_dated_section_for_the_version():
    changes = (ROOT / "CHANGELOG.md").read_text()
    version = re.escape(PROJECT["version"])
    assert re.search(rf"^## {version} - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE)
    assert changes.index("## Unreleased") < changes.index(f"## {PROJECT['version']}")
    headings = re.findall(r"^## \S+", changes, re.MULTILINE)
    assert len({*headings}) == len(headings)


@pytest.mark.parametrize(
    ("tag", "unreleased", "said"),
    [
        ("v1.2.0", "", "the tag is v1.2.0, and pyproject.toml has 1.2.3"),
        ("v1.2.3", "", "CHANGELOG.md has no section '## 1.2.3 - YYYY-MM-DD'"),
        ("v1.2.4", "- More.\n", "CHANGELOG.md has lines under '## Unreleased'"),
    ],
)
def test_a_wrong_tag_builds_nothing(tag, unreleased, said, tmp_path):
    version = "1.2.4" if tag == "v1.2.4" else "1.2.3"
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/build", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    text = f"## Unreleased\n\n{unreleased}\n## 1.2.4 - 2026-01-31\n\n- A line.\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    command = [tmp_path / ".ci/build", "dist", tag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "dist").exists()


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
    assert "if: github.event_name == 'push'" in publish  # not by hand, even on a tag
    assert not re.search(r"password:|secrets\.", text)


def test_the_project_says_where_it_lives():
    assert {"Repository", "Documentation", "Changelog", "Issues"} == {*PROJECT["urls"]}
    classifiers = [x for x in PROJECT["classifiers"] if x.startswith("Programming Language")]
    versions = re.findall(r"3\.\d\d", (ROOT / "noxfile.py").read_text().partition("PYTHONS")[2])
    named = [x.rpartition(" ")[2] for x in classifiers]
    assert named == versions[: len(named)]
    passed = {one["python"].rpartition(".")[0] for one in compatibility.entries()}
    assert {*named} <= passed  # the metadata claim no Python that no lane has passed on


def test_the_page_of_what_passed_is_written_from_what_is_kept():
    assert compatibility.PAGE.read_text() == compatibility.page()
    rows = compatibility.entries()
    assert {one["what"] for one in rows} >= {"the wheel in an empty environment"}
    assert all(f"| {one['python']} | {one['jax']} |" in compatibility.page() for one in rows)
