"""A user's file with the name of a package that comes along is named, whoever meets it first."""

import pytest

from tests.support.import_rules import is_engine_side, modules
from tests.support.paths import ROOT
from tests.support.processes import ended, output_of

# Imports each module by itself; what fails must say which file is to blame.
EACH = """
import importlib, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[3:]:
    before = {*sys.modules}
    try:
        importlib.import_module(name)
        said = "imported"
    except ImportError as error:
        said = f"{type(error).__name__} {error}"
    for made in {*sys.modules} - before:
        if made.partition(".")[0] in ("jax_specdec", sys.argv[2]):
            del sys.modules[made]
    print(name, said, sep="\\t")
"""

FORMS = {"NAME.py": "", "NAME/__init__.py": "x = 1\n"}


def put(folder, name, form):
    """A file of a user's; what stands in errors for it."""
    path = folder / form.replace("NAME", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(FORMS[form])
    return path.parent if path.name == "__init__.py" else path


def said_by(script, *arguments):
    done = ended(script, *arguments)
    return done.returncode, done.stderr


@pytest.mark.parametrize("form", FORMS)
def test_modules_name_the_file_that_hides_ipc(form, tmp_path):
    hiding = put(tmp_path, "ipc", form)
    names = [name for name in modules("jax_specdec") if is_engine_side(name)]
    lines = output_of(EACH, str(tmp_path), "ipc", *names).splitlines()
    said = dict(line.split("\t") for line in lines)
    assert said.keys() == {*names}
    failed = {name: text for name, text in said.items() if text != "imported"}
    assert {"jax_specdec.engine", "jax_specdec.requests", "jax_specdec.export"} <= failed.keys()
    for name, text in failed.items():
        words = f"HiddenPackage {hiding} hides the package ipc ({ROOT / 'ipc'})"
        assert text.startswith(words), name


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import jax_specdec.device", "ipc"),
        ("import jax_specdec.device", "pallas_kernels"),
        ("from jax_specdec.device.worker import worker", "pallas_kernels"),
        ("from jax_specdec.adapters import tunix", "pallas_kernels"),
        ("import ipc; import jax_specdec.engine", "ipc"),  # it is there already
    ],
)
def test_scripts_beside_such_a_file_learn_it(statement, name, tmp_path):
    hiding = put(tmp_path, name, "NAME.py")
    script = tmp_path / "script.py"
    script.write_text(statement)
    code, errors = said_by(script)
    last = errors.splitlines()[-1]
    assert code == 1
    assert f"HiddenPackage: {hiding} hides the package {name} ({ROOT / name})" in last
    assert f"finds it first in {tmp_path}. Rename it, or start Python with -P" in last


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import jax_specdec.engine, jax_specdec.export", "pallas_kernels"),
        ("from jax_specdec.adapters import tunix", "ipc"),
        ("import jax_specdec.engine", "wire"),
    ],
)
def test_files_that_hide_nothing_needed_are_let_be(statement, name, tmp_path):
    put(tmp_path, name, "NAME.py")
    (tmp_path / "script.py").write_text(statement)
    assert said_by(tmp_path / "script.py") == (0, "")


def test_a_script_named_as_the_package_is_told(tmp_path):
    script = tmp_path / "ipc.py"
    script.write_text("import jax_specdec.engine")
    assert f"HiddenPackage: {script} hides the package ipc" in said_by(script)[1]


def test_commands_answer_with_one_line(tmp_path):
    hiding = put(tmp_path, "ipc", "NAME.py")
    environment = {"PYTHONPATH": str(ROOT)}
    done = ended("-m", "jax_specdec.cli", "doctor", cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"jax-specdec: {hiding} hides the package ipc")
