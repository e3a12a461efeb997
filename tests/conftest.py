"""One strict JAX for all tests: no silent promotion, several CPU devices, no hidden state."""

import atexit
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from functools import partial
from importlib import metadata
from pathlib import Path

from jax_specdec import compiled_programs
from tests.support.paths import ROOT
from tests.support.resources import memory

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported

# Tests start dozens of processes. Where Python may write no bytecode next to sources, each of them
# would compile all of jax again, for seconds: it is written into the tests' own folder.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault(
        "PYTHONPYCACHEPREFIX", str(ROOT / ".pytest_cache" / "bytecode")
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Worker processes and tests compile the same programs: once is enough. CI begins without any, so
# that its verdict does not depend on an earlier run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # a process of xdist has the others'
    _kept = ROOT / ".pytest_cache" / f"programs-{metadata.version('jax')}"
    if os.environ.get("CI"):
        _kept = Path(tempfile.mkdtemp(prefix="jax-specdec-tests-"))
        _forget = partial(shutil.rmtree, _kept, ignore_errors=True)
        # Not where a fork ends.
        atexit.register(lambda own: own == os.getpid() and _forget(), os.getpid())
    compiled_programs.prepare(_kept)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_kept)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# jax warns of an entry that another process is writing, or was killed while it wrote, and compiles:
# that is no error, and no line that a worker should print.
_CACHE_WARNING = "Error reading persistent compilation cache entry"
os.environ["PYTHONWARNINGS"] = ",".join(
    filter(None, (os.environ.get("PYTHONWARNINGS"), f"ignore:{_CACHE_WARNING}"))
)

# Settings of the user's terminal would change what the programs under test print: plain text.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PYTHON_COLORS", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# A background job of a script ignores Ctrl-C, and one of `nohup` SIGHUP: every process of a test
# would inherit that.
for _signal, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _usual)

import jax
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.support import quick_compile, shape_checks

# Before jax has a backend: eight CPU devices, so that shard_map tests are real, and programs that
# are compiled quickly, by one thread: the tests' processes have the other cores.
_QUICK = quick_compile.FLAGS.split() if os.environ["JAX_PLATFORMS"] == "cpu" else ()
for _flag in ("--xla_force_host_platform_device_count=8", *_QUICK):
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

# Before the packages are imported: every test checks the shapes that their signatures state.
shape_checks.install("pallas_kernels", "jax_specdec")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a property compiles: a deadline would measure the machine.
settings.register_profile(
    "repository", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("repository")

pytest_plugins = ["tests.support.cpu_report"]

# Tracing makes millions of small objects, and next to none of them in cycles: with Python's own
# threshold of 700, looking for such takes a fourteenth of its time.
gc.set_threshold(100_000, 50, 50)

# Beside the devices nothing is compiled but by these: all else there is fast.
COMPILED = {"device", "adapters", "test_compiled_programs.py", "test_engine.py"}

# Files in other rooms all of whose tests are fast.
FAST = {
    ".": "changed_lanes constants install_advice kernels_weight of_tests "
         "public_names release words",
    "bench": "aot aot_check drafts pictures readme report",
    "bench/loop": "suite",
    "docs": "chips_page fences field_docs figures_of_pages linked_tests",
    "jax_specdec/device/drafting": "drafters",
    "jax_specdec/device/loop": "host_slots",
    "jax_specdec/device/messages": "batch_options pack",
    "jax_specdec/device/worker": "compilations grammars kept_kinds ladder plugin_messages",
    "pallas_kernels": "digests jax_modes proved refusals",
    "pallas_kernels/linear": "linear_refusals",
}  # fmt: skip

# Of what is lowered for chips that are not here, and of meshes: what is not fast has its own lane.
CHIPS = {"mosaic_tpu", "meshes", "test_linear_meshes.py"}

# The folders whose tests take longest: they begin first, so that the processes end together.
LONG = {
    "docs", "jax_specdec/device/loop", "jax_specdec/device/worker", "jax_specdec/engine",
    "jax_specdec/serve", "pallas_kernels", "pallas_kernels/sampling",
}  # fmt: skip

LARGE_MB = 1400  # beyond it, compiled programs are dropped at the end of a module: 2 GB a process


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", f"ignore:{_CACHE_WARNING}")
    if config.option.markexpr == "fast":  # it replaces what pyproject.toml leaves out
        config.option.markexpr = "fast and not slow and not chips and not long"
    config.option.loadscopereorder = False  # not by their numbers of tests


class ByRoom(LoadFileScheduling):
    """Gives a process a whole folder: its files trace the same programs."""

    def _split_scope(self, nodeid):
        return nodeid.partition("::")[0].rpartition("/")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByRoom(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: str(item.path.parent.relative_to(ROOT / "tests")) not in LONG)
    for item in items:
        room, *rest = item.path.relative_to(ROOT / "tests").parts
        folder = item.path.parent.relative_to(ROOT / "tests").as_posix()
        is_fast = item.path.stem.removeprefix("test_") in FAST.get(folder, "").split()
        if is_fast or (room in ("ipc", "jax_specdec") and COMPILED.isdisjoint(rest)):
            item.add_marker("fast")
        if not CHIPS.isdisjoint(rest) and not item.get_closest_marker("fast"):
            item.add_marker("chips")


@pytest.fixture(autouse=True, scope="module")
def _programs_end_with_their_module():
    """Drop compiled programs, which fill gigabytes, once a process is large.

    Those that later modules have too are traced again, and read from the compilation cache.
    """
    yield
    if memory("VmRSS") > LARGE_MB:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back to the system
    if memory("VmRSS") > LARGE_MB:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
