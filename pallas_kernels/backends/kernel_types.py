"""Names of what a kernel is traced with, for which jax and MLIR have no types of their own.

To mypy all of them are `Any`: a name says what a reader may expect.
"""

from typing import Any

Ref = Any  # a reference to an array in a kernel; outside of it, the array
Index = Any  # an integer of a kernel: traced, a Python int, or a slice of some
Scalar = Any  # a number of a kernel
Carry = Any  # a tree of arrays that a loop carries
Layout = Any  # how a vector lies in the registers of a warpgroup
Mlir = Any  # a value, a reference or a type of MLIR, whose bindings are untyped
Interpret = Any  # what a kernel's `interpret` takes: the parameters of an interpreter, or none
