"""The packages that come along, `ipc` and `pallas_kernels`, told from others of the same name.

Python takes the first that stands in its path, and a script's own directory stands before all:
there, an `ipc.py` of the user's hides ours. `import jax_specdec.beside.ipc` says so before anything
of the package is imported; each room that needs it begins with that.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path


class HiddenPackage(ImportError):
    """Something else has the name of a package that comes along."""


def require(name: str) -> None:
    """Check that `name` means the package that comes along with this one.

    Raises:
      HiddenPackage: a file or folder hides it; says which, and the ways out.
    """
    package = Path(__file__).parents[2] / name
    where = _place(name)
    if where is None or not package.is_dir() or _same(where, package):
        return
    raise HiddenPackage(
        f"{where} hides the package {name} ({package}), which jax-specdec needs: Python finds it "
        f"first in {where.parent}. Rename it, or start Python with -P where it is beside a script "
        "that does not import it",
        name=name,
        path=str(where),
    )


def _place(name: str) -> Path | None:
    """The file of a module, or the folder of a package, that the name means; None where neither."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, which somebody has put into sys.modules
        file = getattr(sys.modules[name], "__file__", None)
        return None if file is None else _shown(Path(file))
    return None if spec is None else _place_of(spec)


def _place_of(spec: ModuleSpec) -> Path | None:
    if spec.origin is not None and spec.has_location:
        return _shown(Path(spec.origin))
    folders = list(spec.submodule_search_locations or ())  # of a folder without an __init__.py
    return Path(folders[0]) if folders else None


def _shown(file: Path) -> Path:
    return file.parent if file.name.startswith("__init__.") else file


def _same(where: Path, package: Path) -> bool:
    try:
        return where.samefile(package)
    except OSError:
        return where == package
