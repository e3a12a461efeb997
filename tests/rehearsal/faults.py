"""Kernels with a wrong line, and the parts of a check that must find it."""

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
        GPU + "rows_kernel",
        "total = total * rescale + functools.reduce(jnp.add, terms)",
        "total = total * rescale + functools.reduce(jnp.add, terms) - terms[0]",
        frozenset({"rows", "greedy", "changes", "edges"}),
    ),
    "a term of the entropy dropped": Fault(
        GPU + "rows_kernel",
        "weighted = (weighted + moved * total) * rescale + functools.reduce(jnp.add, by_exponent)",
        "weighted = (weighted + moved * total) * rescale",
        frozenset({"rows", "changes"}),
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
    "a mask off by one": Fault(
        GPU + "reading",
        "    by = token & (WORD - 1)",
        "    by = (token + 1) & (WORD - 1)",
        frozenset({"changes"}),
    ),
    "half of a group's terms": Fault(
        GPU + "groups_kernel",
        "terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]",
        "terms = [a for a, b in zip(terms[::2], terms[1::2], strict=True)]",
        frozenset({"groups", "draws", "verify"}),
    ),
    "an excluded token drawn": Fault(
        GPU + "draw",
        "x = jnp.where(row.excluded.in_group(begin), nothing, x)",
        "x = jnp.where(row.excluded.in_group(begin) & False, nothing, x)",
        frozenset({"draws"}),
    ),
    "equal logits counted": Fault(
        GPU + "count_larger",
        "larger = piece.astype(jnp.float32) > least",
        "larger = piece.astype(jnp.float32) >= least",
        frozenset({"ranks"}),
    ),
    "a term dropped, TPU": Fault(
        TPU + "rows_kernel",
        "out[half] = maximum, larger, total + tree(jnp.add, terms)",
        "out[half] = maximum, larger, total + tree(jnp.add, terms) - terms[0]",
        frozenset({"rows", "greedy"}),
    ),
    "a term dropped of a second sum, TPU": Fault(
        TPU + "rows_kernel",
        "more = [chains(jnp.add, terms)]",
        "more = [chains(jnp.add, terms) - terms[0]]",
        frozenset({"rows", "changes", "edges"}),  # with an entropy, or beside rows far from a guess
    ),
    "a rank off by one, TPU": Fault(
        TPU + "rows_kernel",
        "larger = larger + jnp.where(one > given[half].limit, 1.0, 0.0)",
        "larger = larger + jnp.where(one >= given[half].limit, 1.0, 0.0)",
        frozenset({"rows", "edges"}),
    ),
    "half of a group's terms, TPU": Fault(
        TPU + "groups_kernel",
        "terms = functools.reduce(jnp.add, [jnp.exp2((one - reference) * scale) for one in x])",
        "terms = jnp.exp2((x[0] - reference) * scale)",
        frozenset({"groups"}),
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
