"""Imports run one way, folder by folder; each check is shown to be able to fail.

The rule is the tree: a file may import what its folder may. Only `jax_specdec/device` and
`jax_specdec/adapters` import jax, a package is used through its door, and rooms import the rooms
below them and no others.
"""

import ast
import graphlib
import sys

import pytest

from tests.support.import_rules import DOORS, PACKAGES, is_engine_side, modules, tops
from tests.support.pages import PAGES, python_blocks
from tests.support.processes import ended

BESIDE = ("bench", "tests", "examples", "docs")

# The libraries that a package may import, beside the standard library and the packages below it.
LIBRARIES = {
    "ipc": {"numpy", "posix_ipc", "xxhash"},
    "pallas_kernels": {"numpy", "jax", "jaxtyping"},
}
MACHINE = "tests.ptx_machine"  # executes PTX, whoever wrote it: it imports nothing of ours
ACCELERATED = {"jax", "jaxlib", "flax", "optax", "chex", "torch"}

# Each room of jax_specdec, and the rooms that it may import. A door imports the rooms behind it.
ROOMS = {
    "beside": set(),  # which every room may import
    "adapters": set(),
    "wording": set(),
    "compiled_programs": set(),
    "requests": set(),
    "kept_sets": set(),
    "declaration": {"requests"},
    "control": {"requests", "declaration"},
    "child": {"control"},
    "checkpoint": {"wording"},
    "text": {"checkpoint"},
    "structured": {"requests", "text", "checkpoint", "child"},
    "records": {"kept_sets", "requests", "wording"},
    "export": {"engine", "records", "kept_sets", "requests", "text", "wording"},
    "engine": {
        "records", "requests", "declaration", "control", "structured", "checkpoint", "text",
        "wording",
    },
    "serve": {
        "engine", "export", "records", "requests", "structured", "checkpoint", "text", "wording",
    },
    "ray": {
        "serve", "engine", "export", "records", "requests", "control", "structured", "checkpoint",
        "wording",
    },
    "cli": {
        "ray", "serve", "engine", "export", "records", "requests", "control", "checkpoint", "text",
        "wording", "compiled_programs", "declaration",
    },
    "device.model": {"checkpoint", "wording"},
    "device.drafting": {"device.model", "checkpoint", "control", "text", "wording"},
    "device.messages": {"device.model", "kept_sets", "requests", "wording"},
    "device.loop": {
        "device.messages", "device.drafting", "device.model", "checkpoint", "requests", "wording",
        "structured", "declaration",
    },
    "device.worker": {
        "device.loop", "device.messages", "device.drafting", "device.model", "control", "child",
        "requests", "declaration", "text", "checkpoint", "wording", "compiled_programs",
        "structured",
    },
}  # fmt: skip
# The rooms of pallas_kernels, floor by floor: a room imports rooms of lower floors. "" and
# `sampling` are the doors.
FLOORS = (
    {"contract", "lowering"},
    {"numbers", "meshes"},
    {"backends"},
    {"topk", "linear"},
    {"sampling", ""},
)
MOST_ARROWS = 30  # from room to room
BESIDE_THE_HOUSE = {"testing"}  # the oracle and the shapes of tests and benchmarks
ROOMS["device"] = {name for name in ROOMS if name.startswith("device.")} | {"checkpoint"}


KNOWN = modules(*PACKAGES, "bench", "tests")


def room_of(name):
    """The room of a module of jax_specdec, "" for its root."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["device"] and len(parts) > 2 else parts[:1])


def kernel_room_of(name):
    """The room of a module of pallas_kernels, "" for its door."""
    return (name.split(".") + [""])[1]


def kernel_arrows(found):
    """From room to room of pallas_kernels: every import, wherever the statement stands."""
    pairs = set()
    for name, path in found.items():
        for module in imports(path.read_text()):
            if tops({module}) == {"pallas_kernels"}:
                pairs.add((kernel_room_of(name), kernel_room_of(module)))
    return {(room, other) for room, other in pairs if room != other}


def upward(arrows):
    """The arrows that lead to the same floor, or up."""
    floor = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}
    return {(room, other) for room, other in arrows if floor[other] >= floor[room]}


def imports(source, known=KNOWN):
    """Every module that `source` imports, wherever the statement stands."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # of the machine, which can be lifted out; `violations` refuses others
                found.add("." * node.level + (node.module or ""))
                continue
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in whole if name in known}
            found |= modules if len(modules) == len(whole) else modules | {node.module}
    return found


def listed(door):
    """What a door's `__all__` lists, with the door's name before it: modules may be among them."""
    for node in ast.parse(KNOWN[door].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {f"{door}.{name}" for name in ast.literal_eval(node.value)}
    return set()


def violations(name, source):
    """What the module `name` imports against the rules."""
    package, used = name.partition(".")[0], imports(source)
    relative = {module for module in used if module.startswith(".")}
    used -= relative
    own = name.startswith(MACHINE)
    wrong = {module for module in relative if not own or module.startswith("..")}
    for other, door in DOORS.items():
        # Tests and measurements look behind doors; users and examples do not.
        if package != other and package not in ("tests", "bench"):
            wrong |= of(used, {other}) - door.union(*map(listed, door))
    if package in PACKAGES:
        wrong |= of(used, BESIDE)
        if name not in ("jax_specdec.cli.__main__", "jax_specdec.cli.main"):
            wrong |= used & {"jax_specdec.cli.main"}
    if package in LIBRARIES:
        wrong |= used - of(used, {package, *LIBRARIES[package], *sys.stdlib_module_names})
    if is_engine_side(name):
        wrong |= of(used, ACCELERATED | {"pallas_kernels"})
    if package == "jax_specdec":
        below = {room_of(name), "beside", *ROOMS.get(room_of(name), ())}
        # What `__init__` of a room exports is for those outside the package.
        wrong |= {module for module in of(used, {"jax_specdec"}) if room_of(module) not in below}
    if package == "bench":
        wrong |= of(used, {"tests", "examples"})
    if package == "tests":
        # What two of them need is in tests/support.
        wrong |= {module for module in used if module.startswith("tests.") and ".test_" in module}
    if package == "tests" and not name.startswith("tests.bench"):
        # The lane `peers` runs in the environments that are measured in.
        lent = "bench.peers" if name.startswith("tests.peers") else "tests"
        wrong |= {module for module in of(used, {"bench"}) if not module.startswith(lent)}
    if name.startswith(MACHINE):
        wrong |= used - of(used, {"numpy", "pytest", *sys.stdlib_module_names})
    return sorted(wrong)


def of(used, packages):
    """Those modules that are in one of the packages."""
    return {module for module in used if module.partition(".")[0] in packages}


def broken(found):
    wrong = {name: violations(name, path.read_text()) for name, path in found.items()}
    return {name: modules for name, modules in wrong.items() if modules}


def test_imports_run_one_way():
    found = modules(*PACKAGES)
    some = {"ipc.wire", "jax_specdec.engine.engine", "pallas_kernels.backends.xla.rows"}
    assert some <= found.keys()
    assert broken(found) == {}


def test_every_file_of_jax_specdec_is_in_a_room():
    rooms = {room_of(name) for name in modules("jax_specdec")}
    assert rooms - {""} == ROOMS.keys()


def test_the_kernels_house():
    """Every file is in a room; arrows lead down, and are few."""
    found = modules("pallas_kernels")
    house = {k: v for k, v in found.items() if kernel_room_of(k) not in BESIDE_THE_HOUSE}
    assert {kernel_room_of(name) for name in house} == set().union(*FLOORS)
    arrows = kernel_arrows(house)
    assert upward(arrows) == set()
    assert len(arrows) <= MOST_ARROWS


def test_an_arrow_up_is_found(tmp_path):
    """Lazy imports and those for type checkers count."""
    file = tmp_path / "x.py"
    file.write_text(
        "def f():\n    from pallas_kernels.topk.call import topk_logprobs\n"
        "if TYPE_CHECKING:\n    from pallas_kernels.linear import call\n"
        "from pallas_kernels.contract import types"
    )
    found = upward(kernel_arrows({"pallas_kernels.backends.x": file}))
    assert found == {("backends", "topk"), ("backends", "linear")}


def test_rooms_form_no_circle():
    graphlib.TopologicalSorter(ROOMS).prepare()  # raises CycleError


@pytest.mark.parametrize("top", ["examples", "bench", "tests"])
def test_what_stands_beside_keeps_to_its_doors(top):
    assert broken(modules(top)) == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_keeps_to_the_doors(page):
    assert not any(violations(f"docs.{page.stem}", code) for code in python_blocks(page))


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("ipc.reader", "import jax.numpy as jnp", "jax.numpy"),
        ("jax_specdec.records.decode", "def f():\n    from jax import numpy", "jax"),
        ("ipc.reader", "from . import wire", "."),
        ("jax_specdec.adapters.tunix", "from pallas_kernels.topk.call import topk_logprobs",
         "pallas_kernels.topk.call"),
        ("jax_specdec.engine.engine", "from jax_specdec.adapters import replacing",
         "jax_specdec.adapters.replacing"),
        ("jax_specdec.records.record", "from pallas_kernels import greedy", "pallas_kernels"),
        ("jax_specdec.records.record", "from jax_specdec.engine import engine",
         "jax_specdec.engine.engine"),
        ("jax_specdec.cli.demo_command", "from jax_specdec.cli.main import main",
         "jax_specdec.cli.main"),
        ("jax_specdec.device.messages.pack", "import bench.timing", "bench.timing"),
        ("docs.export", "from jax_specdec.export import column_builder",
         "jax_specdec.export.column_builder"),
        ("bench.host", "from tests.support import scene", "tests.support.scene"),
        ("tests.peers.run", "from bench import timing", "bench.timing"),
        ("tests.ipc.test_wire", "from tests.ipc.test_aio import soon", "tests.ipc.test_aio"),
        ("tests.ptx_machine.machine", "from tests.support import paths", "tests.support.paths"),
        ("tests.ptx_machine.test_machine", "from ..support import paths", "..support"),
    ],
)  # fmt: skip
def test_a_violation_is_found(name, source, wrong):
    assert wrong in violations(name, source)


def test_a_consumer_process_never_starts_an_accelerator_runtime():
    names = [name for name in modules(*PACKAGES) if is_engine_side(name)]
    code = f"import sys, {', '.join(names)}; sys.exit(any(m in sys.modules for m in {ACCELERATED}))"
    assert ended("-c", code).returncode == 0


def circles(sources):
    """Modules that import each other, by whatever way; `sources` by module."""
    arrows = {
        name: (imports(source, sources) & sources.keys()) - {name}
        for name, source in sources.items()
    }
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return sorted({*error.args[1]})
    return []


def test_no_modules_import_each_other():
    sources = {name: path.read_text() for name, path in modules(*PACKAGES, "bench").items()}
    assert circles(sources) == []
    # The control: three in a circle, one of them by an import in a function.
    three = {"a.x": "import a.y", "a.y": "from a import z", "a.z": "def f():\n import a.x"}
    assert circles(three | {"a.w": "import a.x"}) == ["a.x", "a.y", "a.z"]
