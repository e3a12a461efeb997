"""Kernels with a wrong line, and the parts of a check that must find it: each part finds one."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

GPU, TPU = "pallas_kernels.backends.mosaic_gpu.", "pallas_kernels.backends.mosaic_tpu."


class Fault(NamedTuple):
    """A line of a module's source, what it is replaced by, and the parts that then fail."""

    module: str
    line: str
    wrong: str
    found_by: frozenset[str]

    @property
    def backend(self) -> str:
        """Whose kernel it is."""
        return self.module.split(".")[2]


FAULTS = {
    "a term dropped": Fault(
        GPU + "row_sum",
        "total, *others = thread.words(digits)",
        "total, _, *others = thread.words(digits)",
        frozenset({"rows", "changes", "edges"}),
    ),
    "a rank off by one": Fault(
        GPU + "finish_kernel", "rank = 1 + count", "rank = count", frozenset({"rows", "edges"})
    ),
    "ties in another order": Fault(
        GPU + "thread",
        "return Word(arith.ori(upper, arith.extui(long, low.value)))",
        "return Word(arith.ori(upper, arith.extui(long, (~low).value)))",
        frozenset({"groups", "candidates", "edges"}),
    ),
    "half of a group's terms": Fault(
        GPU + "groups_kernel",
        "terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]",
        "terms = [a for a, b in zip(terms[::2], terms[1::2], strict=True)]",
        frozenset({"rows", "greedy", "changes", "edges", "groups", "draws", "verify"}),
    ),
    "equal logits counted": Fault(
        GPU + "count_larger",
        "larger = piece.astype(jnp.float32) > least",
        "larger = piece.astype(jnp.float32) >= least",
        frozenset({"ranks"}),
    ),
    "a rank off by one, TPU": Fault(
        TPU + "group_sweep",
        "larger[half] = larger[half] + jnp.where(logits > limit, 1.0, 0.0)",
        "larger[half] = larger[half] + jnp.where(logits >= limit, 1.0, 0.0)",
        frozenset({"rows", "edges"}),
    ),
    "half of a group's terms, TPU": Fault(
        TPU + "group_sweep",
        "sums = [self._added(terms)]",
        "sums = [self._added(terms[:1])]",
        frozenset({"rows", "greedy", "changes", "groups", "edges"}),
    ),
}


def plant(fault: Fault) -> None:
    """Load the module with the wrong line, before anything else imports it."""
    assert fault.module not in sys.modules
    spec = importlib.util.find_spec(fault.module)
    assert spec is not None
    source = Path(str(spec.origin)).read_text()
    assert source.count(fault.line) == 1, f"{fault.module} has another line now: {fault.line}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[fault.module] = module
    exec(compile(source.replace(fault.line, fault.wrong), spec.origin, "exec"), module.__dict__)
    parent, _, name = fault.module.rpartition(".")
    setattr(importlib.import_module(parent), name, module)
