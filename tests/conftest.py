"""One strict JAX for every test: no silent promotion, several CPU devices, no hidden state."""

import atexit
import gc
import os
import shutil
import signal
import tempfile

# Before jax is imported: eight CPU devices, so that shard_map tests are real.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

# Worker processes and tests compile the same programs again and again: once a run will do.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="jax-specdec-tests-")
    _OWNER = os.getpid()
    atexit.register(lambda: os.getpid() == _OWNER and shutil.rmtree(_CACHE, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Another process may be writing the entry that is read, or have been killed while it wrote it. jax
# warns and compiles: neither an error here nor an odd line among what a worker prints.
_CACHE_WARNING = "Error reading persistent compilation cache entry"
os.environ["PYTHONWARNINGS"] = ",".join(
    filter(None, (os.environ.get("PYTHONWARNINGS"), f"ignore:{_CACHE_WARNING}"))
)

# Who runs the tests has settings that programs look at; those under test are asked for plain text.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PYTHON_COLORS", "TTY_COMPATIBLE"):
    os.environ.pop(_name, None)

# A job that a script runs in the background ignores Ctrl-C, and so would every process of a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.support import shape_checks

# Before the packages are imported: every test checks the shapes that their signatures state.
shape_checks.install("pallas_kernels", "jax_specdec")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling dominates the first example of a property: a deadline would only measure the machine.
settings.register_profile(
    "repository", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("repository")


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", f"ignore:{_CACHE_WARNING}")


@pytest.fixture(autouse=True, scope="module")
def _earlier_programs_are_not_searched():
    """Compiled programs are millions of objects, and stay: the collector need not visit them."""
    gc.collect()
    gc.freeze()
