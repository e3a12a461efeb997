"""What PTX instructions without memory compute: raw bits in, raw bits out, one lane a thread.

float32 operations are IEEE in NumPy as on the GPU; `fma` is rounded once, exactly; a NaN that is
computed has the GPU's bits. Approximate instructions (`ex2.approx`, `div.full`) give the correctly
rounded value, which `Errors` may move as far as the PTX ISA allows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

# Raw bits by the letter of an operand: p predicate, h 16, w 32, d 64.
TYPES = {"p": np.bool_, "h": np.uint16, "w": np.uint32, "d": np.uint64}
KINDS = {"pred": "p", "b16": "h", "b32": "w", "b64": "d"}
BITS = {"h": 16, "w": 32, "d": 64}

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FLOAT_COMPARISONS = (*COMPARISONS, "equ", "neu", "ltu", "leu", "gtu", "geu", "nan", "num")

NAN32, NAN16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)  # what every float operation returns


class Errors:
    """Errors of approximate instructions: none, or the largest that the PTX ISA documents.

    https://docs.nvidia.com/cuda/parallel-thread-execution: ex2.approx.f32 has a relative error of
    at most 2**-22, div.full.f32 one of at most 2 ulp, here 2**-22 too.
    """

    def __init__(self, direction: Literal["none", "up", "down", "random"] = "none") -> None:
        self.direction = direction

    def move(self, exact: np.ndarray) -> np.ndarray:
        """exact: float64; zero, infinities and 1 (the exponential of 0) stay.

        "random" depends on nothing but the exact result: every thread errs alike.
        """
        if self.direction == "none":
            return exact
        if self.direction == "random":
            mixed = exact.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            by = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1
        else:
            by = 1.0 if self.direction == "up" else -1.0
        # A hair less, for the rounding to float32 that follows is within the bound.
        return np.where(exact == 1, exact, exact * (1 + by * (2.0**-22 - 2.0**-24)))


@dataclass(frozen=True)
class Operation:
    """result and sources as letters of `TYPES`; `approximate` functions take `Errors` first."""

    result: str
    sources: str
    function: Callable[..., np.ndarray]
    approximate: bool = False


def floats(x: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits as float32 values; of 16-bit kinds exactly."""
    if kind == "f32":
        return x.view(np.float32)
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    assert kind == "bf16", kind
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bits32(x: np.ndarray) -> np.ndarray:
    """float32 values as raw bits, with the NaN of the GPU."""
    raw = np.asarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), NAN32, raw)


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits of float32 as those of f16 or bf16, ties to even, with the NaN of the GPU."""
    if kind == "f16":
        with np.errstate(over="ignore"):
            narrow = floats(x, "f32").astype(np.float16).view(np.uint16)
    else:
        odd = (x >> np.uint32(16)) & np.uint32(1)
        narrow = ((x.astype(np.uint64) + 0x7FFF + odd) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(floats(x, "f32")), NAN16, narrow)


def both_rounded(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16x2.f32: the first source is the upper half."""
    upper, lower = (rounded(x, "bf16").astype(np.uint32) for x in (high, low))
    return (upper << np.uint32(16)) | lower


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 values, rounded once.

    The product is exact in float64; the sum is rounded to odd there, by the error of an ordinary
    sum (Knuth's two-sum), so that the rounding to float32 is the only one (Boldo, Melquiond 2008).
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    raw = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (raw & 1 == 0)
    away = (error > 0) == (total > 0)  # towards the exact sum: larger or smaller in size
    odd = np.where(inexact, raw + np.where(away, 1, -1), raw)
    return odd.view(np.float64).astype(np.float32)


def exponential(flush: bool) -> Callable[..., np.ndarray]:
    """2**x; `flush`: subnormals become zero, in and out."""

    def ex2(errors: Errors, x: np.ndarray) -> np.ndarray:
        value = floats(x, "f32")
        if flush:
            value = flushed(value)
        result = errors.move(np.exp2(value.astype(np.float64))).astype(np.float32)
        return bits32(flushed(result) if flush else result)

    return ex2


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def divide(errors: Errors, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    exact = floats(a, "f32").astype(np.float64) / floats(b, "f32").astype(np.float64)
    return bits32(errors.move(exact).astype(np.float32))


def of_f32(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda *args: bits32(function(*(floats(x, "f32") for x in args)))


def narrow_difference(kind: str) -> Callable[..., np.ndarray]:
    return lambda a, b: bits32(np.subtract(floats(a, kind), floats(b, "f32")))


def largest(kind: str) -> Callable[..., np.ndarray]:
    """max.NaN: a NaN if either is one; 0.0 is larger than -0.0."""
    sign, nan = (31, NAN32) if kind == "f32" else (15, NAN16)

    def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = floats(a, kind), floats(b, kind)
        take_a = (x > y) | ((x == y) & (a >> a.dtype.type(sign) == 0))
        return np.where(np.isnan(x) | np.isnan(y), nan, np.where(take_a, a, b))

    return maximum


def smallest(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.NaN.f32: a NaN if either is one; -0.0 is smaller than 0.0."""
    sign = np.uint32(1 << 31)
    found = largest("f32")(a ^ sign, b ^ sign)
    return np.where(found == NAN32, NAN32, found ^ sign)


def packed(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """On both 16-bit halves of 32-bit words."""

    def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        low = function(a.astype(np.uint16), b.astype(np.uint16)).astype(np.uint32)
        half = np.uint32(16)
        high = function((a >> half).astype(np.uint16), (b >> half).astype(np.uint16))
        return (high.astype(np.uint32) << half) | low

    return both


def paired(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """On both 32-bit halves of 64-bit words."""

    def both(*args: np.ndarray) -> np.ndarray:
        half = np.uint64(32)
        low = function(*(x.astype(np.uint32) for x in args)).astype(np.uint64)
        high = function(*((x >> half).astype(np.uint32) for x in args)).astype(np.uint64)
        return (high << half) | low

    return both


def signed(x: np.ndarray) -> np.ndarray:
    return x.view({2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize])


def to_signed(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def run(*args: np.ndarray) -> np.ndarray:
        out = function(*(signed(x) for x in args))
        return out.view(args[0].dtype)

    return run


def shift(name: str, kind: str) -> Callable[..., np.ndarray]:
    """The result of a shift by the width or more: all zeros, or all signs."""
    width = int(kind[1:])

    def run(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        amount = np.minimum(by, np.uint32(width - 1)).astype(x.dtype)
        if kind.startswith("s"):
            return (signed(x) >> amount.astype(signed(x).dtype)).view(x.dtype)
        moved = x << amount if name == "shl" else x >> amount
        return np.where(by >= width, x.dtype.type(0), moved)

    return run


def funnel_right(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
    """shf.r.wrap: the lower word of both, moved by the last five bits of `by`."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return (both >> (by.astype(np.uint64) & np.uint64(31))).astype(np.uint32)


def funnel_left(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
    """shf.l.wrap: the upper word of both, moved by the last five bits of `by`."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    moved = both << (by.astype(np.uint64) & np.uint64(31))
    return (moved >> np.uint64(32)).astype(np.uint32)


def wide_product(kind: str) -> Callable[..., np.ndarray]:
    to = np.int64 if kind == "s32" else np.uint64
    source = signed if kind == "s32" else (lambda x: x)
    return lambda a, b: (source(a).astype(to) * source(b).astype(to)).view(np.uint64)


def bit_field(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    moved = x.astype(np.uint64) >> (start.astype(np.uint64) & np.uint64(255))
    mask = (np.uint64(1) << np.minimum(length, 32).astype(np.uint64)) - np.uint64(1)
    return (moved & mask).astype(np.uint32)


def truncated(x: np.ndarray) -> np.ndarray:
    """cvt.rzi.s32.f32: towards zero, saturated; NaN becomes 0."""
    value = np.nan_to_num(floats(x, "f32").astype(np.float64), nan=0.0)
    return np.clip(np.trunc(value), -(2.0**31), 2.0**31 - 1).astype(np.int32).view(np.uint32)


def comparison(name: str, kind: str) -> Callable[..., np.ndarray]:
    """setp; comparisons of floats are false where one is NaN, those that end in u are true."""
    order = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }
    if "f" not in kind:
        convert = signed if kind.startswith("s") else (lambda x: x)
        return lambda a, b: order[name](convert(a), convert(b))

    def of_floats(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = floats(a, kind), floats(b, kind)
        unordered = np.isnan(x) | np.isnan(y)
        if name in ("nan", "num"):
            return unordered if name == "nan" else ~unordered
        if name in order:
            return order[name](x, y) & ~unordered
        return order[name[:-1]](x, y) | unordered

    return of_floats


def _letter(kind: str) -> str:
    return {"16": "h", "32": "w", "64": "d"}[kind[-2:]]


def _table() -> dict[str, Operation]:
    out: dict[str, Operation] = {}

    def add(names: str, result: str, sources: str, function: Callable[..., np.ndarray]) -> None:
        for name in names.split():
            out[name] = Operation(result, sources, function)

    for rounding in ("", ".rn"):
        add(f"add{rounding}.f32", "w", "ww", of_f32(np.add))
        add(f"sub{rounding}.f32", "w", "ww", of_f32(np.subtract))
        add(f"mul{rounding}.f32", "w", "ww", of_f32(np.multiply))
    add("fma.rn.f32", "w", "www", of_f32(fma))
    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        add(f"{name}.f32x2", "d", "dd", paired(of_f32(function)))
    add("fma.rn.f32x2", "d", "ddd", paired(of_f32(fma)))
    for kind in ("bf16", "f16"):  # the first source is narrow
        add(f"sub.rn.f32.{kind}", "w", "hw", narrow_difference(kind))
    add("neg.f32", "w", "w", lambda x: x ^ np.uint32(1 << 31))
    add("abs.f32", "w", "w", lambda x: x & np.uint32(0x7FFFFFFF))
    out["ex2.approx.f32"] = Operation("w", "w", exponential(False), True)
    out["ex2.approx.ftz.f32"] = Operation("w", "w", exponential(True), True)
    out["div.full.f32"] = Operation("w", "ww", divide, True)
    for kind in ("f32", "bf16", "f16"):
        add(f"max.NaN.{kind}", _letter(kind), _letter(kind) * 2, largest(kind))
        for name in FLOAT_COMPARISONS:
            add(f"setp.{name}.{kind}", "p", _letter(kind) * 2, comparison(name, kind))
    add("min.NaN.f32", "w", "ww", smallest)
    add("max.NaN.bf16x2", "w", "ww", packed(largest("bf16")))
    add("max.NaN.f16x2", "w", "ww", packed(largest("f16")))
    for kind in ("b16", "b32", "b64", "s16", "u32", "s32", "u64", "s64"):
        letter = _letter(kind)
        names = COMPARISONS[:2] if kind[0] == "b" else COMPARISONS
        for name in names:
            add(f"setp.{name}.{kind}", "p", letter * 2, comparison(name, kind))
    for kind in ("s16", "s32", "s64"):
        letter = _letter(kind)
        add(f"add.{kind}", letter, letter * 2, np.add)
        add(f"sub.{kind}", letter, letter * 2, np.subtract)
        add(f"mul.lo.{kind}", letter, letter * 2, np.multiply)
        add(f"mad.lo.{kind}", letter, letter * 3, lambda a, b, c: a * b + c)
    add("neg.s32", "w", "w", lambda x: np.uint32(0) - x)
    for name, function in (("min", np.minimum), ("max", np.maximum)):
        add(f"{name}.s32", "w", "ww", to_signed(function))
        add(f"{name}.u32", "w", "ww", function)
    add("mul.wide.u16", "w", "hh", lambda a, b: a.astype(np.uint32) * b.astype(np.uint32))
    add("mul.wide.u32", "d", "ww", wide_product("u32"))
    add("mul.wide.s32", "d", "ww", wide_product("s32"))
    for kind in ("pred", "b16", "b32", "b64"):
        letter = KINDS[kind]
        add(f"and.{kind}", letter, letter * 2, np.bitwise_and)
        add(f"or.{kind}", letter, letter * 2, np.bitwise_or)
        add(f"xor.{kind}", letter, letter * 2, np.bitwise_xor)
        add(f"not.{kind}", letter, letter, np.invert)
        add(f"mov.{kind}", letter, letter, lambda x: x)
    add("mov.u32", "w", "w", lambda x: x)
    for kind in ("b16", "b32", "b64", "f32"):
        letter = _letter(kind)
        add(f"selp.{kind}", letter, letter * 2 + "p", lambda a, b, p: np.where(p, a, b))
    for name, kinds in (
        ("shl", ("b16", "b32", "b64")),
        ("shr", ("u16", "s16", "u32", "s32", "u64", "s64")),
    ):
        for kind in kinds:
            add(f"{name}.{kind}", _letter(kind), _letter(kind) + "w", shift(name, kind))
    add("shf.r.wrap.b32", "w", "www", funnel_right)
    add("shf.l.wrap.b32", "w", "www", funnel_left)
    add("popc.b32", "w", "w", lambda x: np.bitwise_count(x).astype(np.uint32))
    add("bfe.u32", "w", "www", bit_field)
    add("cvt.f32.bf16", "w", "h", lambda x: bits32(floats(x, "bf16")))
    add("cvt.f32.f16", "w", "h", lambda x: bits32(floats(x, "f16")))
    add("cvt.rn.f16.f32", "h", "w", lambda x: rounded(x, "f16"))
    add("cvt.rn.bf16.f32", "h", "w", lambda x: rounded(x, "bf16"))
    add("cvt.rn.bf16x2.f32", "w", "ww", both_rounded)
    add("cvt.u16.u32", "h", "w", lambda x: x.astype(np.uint16))
    add("cvt.u32.u16", "w", "h", lambda x: x.astype(np.uint32))
    add("cvt.u64.u16", "d", "h", lambda x: x.astype(np.uint64))
    add("cvt.u64.u32", "d", "w", lambda x: x.astype(np.uint64))
    add("cvt.s64.s32", "d", "w", lambda x: signed(x).astype(np.int64).view(np.uint64))
    add("cvt.u32.u64", "w", "d", lambda x: x.astype(np.uint32))
    add("cvt.rn.f32.s32", "w", "w", lambda x: bits32(signed(x).astype(np.float32)))
    add("cvt.rn.f32.u32", "w", "w", lambda x: bits32(x.astype(np.float32)))
    add("cvt.rzi.s32.f32", "w", "w", truncated)
    # Generic and global addresses are the same.
    add("cvta.to.global.u64 cvta.global.u64", "d", "d", lambda x: x)
    return out


OPERATIONS = _table()
