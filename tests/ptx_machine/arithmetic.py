"""What PTX instructions without memory compute: raw bits in, raw bits out, one lane a thread.

float32 operations are IEEE in NumPy as on the GPU; `fma` is rounded once, exactly; a NaN that is
computed has the GPU's bits. Approximate instructions (`ex2.approx`, `div.full`, `rcp.approx`) give
the correctly rounded value, which `Hardware` may move as far as the PTX ISA allows.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

# Raw bits by the letter of an operand: p predicate, h 16, w 32, d 64.
TYPES = {"p": np.bool_, "h": np.uint16, "w": np.uint32, "d": np.uint64}
KINDS = {"pred": "p", "b16": "h", "b32": "w", "b64": "d"}
BITS = {"p": 1, "h": 16, "w": 32, "d": 64}
WIDER = {"h": "w", "w": "d"}

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FLOAT_COMPARISONS = (*COMPARISONS, *(f"{name}u" for name in COMPARISONS), "num", "nan")
INTEGERS = tuple(sign + bits for sign in "us" for bits in ("16", "32", "64"))

NAN32, NAN16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)  # what every float operation returns


@dataclass(frozen=True)
class Hardware:
    """Choices that the PTX ISA leaves open.

    errors: of approximate instructions, none or the largest that are documented. A relative error
    of ex2.approx.f32 is at most 2**-22, of div.full.f32 at most 2 ulp, here 2**-22 too, and of
    rcp.approx.f32 1 ulp, here as much
    (https://docs.nvidia.com/cuda/parallel-thread-execution).
    """

    leader: int = 0  # of the lanes that elect.sync may choose: this one, counted from the first
    garbage: int = 0  # the byte in registers and shared memory before they are written
    errors: Literal["none", "up", "down", "random"] = "none"
    max_instructions: int = 20_000_000  # of one batch: a spoiled program may not end

    def approximate(self, exact: np.ndarray) -> np.ndarray:
        """exact: float64; zero, infinities and 1 (the exponential of 0) stay.

        "random" depends on nothing but the exact result: every thread errs alike.
        """
        if self.errors == "none":
            return exact
        mixed = exact.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        random = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1
        by = {"up": 1.0, "down": -1.0, "random": random}[self.errors]
        # A hair less, for the rounding to float32 that follows is within the bound.
        return np.where(exact == 1, exact, exact * (1 + by * (2.0**-22 - 2.0**-24)))


Function = Callable[..., np.ndarray]


@dataclass(frozen=True)
class Operation:
    """results and sources as letters of `TYPES`; a capital one may not be undefined.

    spread: how undefined bits are handed on where `undefined.rule` does not know it.
    of_hardware: the function takes `Hardware` first.
    """

    results: str
    sources: str
    function: Callable[..., Any]
    spread: Callable[..., Any] | None = None
    of_hardware: bool = False


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


def halves(x: np.ndarray, narrow: type) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper half of each word."""
    return x.astype(narrow), (x >> x.dtype.type(8 * narrow().itemsize)).astype(narrow)


def joined(low: np.ndarray, high: np.ndarray, wide: type) -> np.ndarray:
    """Words of two halves."""
    return low.astype(wide) | high.astype(wide) << wide(8 * low.dtype.itemsize)


def packed(function: Function, narrow: type, wide: type) -> Function:
    """On both halves of words."""

    def both(*args: np.ndarray) -> np.ndarray:
        parts = zip(*(halves(x, narrow) for x in args), strict=True)
        return joined(*(function(*part) for part in parts), wide)

    return both


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits of float32 as those of f16 or bf16, ties to even, with the NaN of the GPU."""
    if kind == "f16":
        narrow = floats(x, "f32").astype(np.float16).view(np.uint16)
    else:
        odd = (x >> np.uint32(16)) & np.uint32(1)
        narrow = ((x.astype(np.uint64) + 0x7FFF + odd) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(floats(x, "f32")), NAN16, narrow)


def sum_of(kind: str) -> Function:
    """add.rn of 16 bits: of sums that are rounded to 2 p + 2 bits or more before, the rounding to p
    bits is that of the exact sum (Figueroa 1995); float32 has 24, and p is 11 or 8.
    """
    return lambda a, b: rounded(bits32(floats(a, kind) + floats(b, kind)), kind)


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


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormals become zero."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def exponential(hardware: Hardware, x: np.ndarray, ends: Function = np.asarray) -> np.ndarray:
    """2**x; ends: what becomes of numbers as they come and go."""
    exact = np.exp2(ends(floats(x, "f32")).astype(np.float64))
    return bits32(ends(hardware.approximate(exact).astype(np.float32)))


def divide(hardware: Hardware, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    exact = floats(a, "f32").astype(np.float64) / floats(b, "f32").astype(np.float64)
    return bits32(hardware.approximate(exact).astype(np.float32))


def reciprocal(hardware: Hardware, x: np.ndarray) -> np.ndarray:
    one = np.full_like(x, np.float32(1).view(np.uint32))
    return divide(hardware, one, x)


def of_f32(function: Function) -> Function:
    return lambda *args: bits32(function(*(floats(x, "f32") for x in args)))


def largest(kind: str) -> Function:
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


def signed(x: np.ndarray) -> np.ndarray:
    return x.view({2: np.int16, 4: np.int32, 8: np.int64}[x.dtype.itemsize])


def to_signed(function: Function) -> Function:
    return lambda *args: function(*map(signed, args)).view(args[0].dtype)


def exact(kind: str) -> Function:
    """Integers of a kind in words of twice their width, with their sign; of 64 bits as Python's."""
    wide = {"16": np.uint32, "32": np.uint64, "64": object}[kind[1:]]

    def run(x: np.ndarray) -> np.ndarray:
        return (signed(x) if kind[0] == "s" else x).astype(wide)

    return run


def product(kind: str) -> Function:
    """All bits of a product of integers; of 64 bits as Python's integers."""
    widen = exact(kind)
    return lambda a, b: widen(a) * widen(b)


def upper_product(kind: str) -> Function:
    """The upper half of a product of integers."""
    both, bits = product(kind), int(kind[1:])

    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        found = both(a, b)
        if bits == 64:
            return np.vectorize(lambda x: x >> 64 & (1 << 64) - 1, otypes=[np.uint64])(found)
        return (found >> found.dtype.type(bits)).astype(a.dtype)

    return run


def added(function: Function) -> Function:
    return lambda a, b, c: function(a, b) + c


def converted(source: str, result: str) -> Function:
    """An integer of another width, which keeps its sign if the source has one."""
    dtype = TYPES[_letter(result)]
    return lambda x: (signed(x) if source[0] == "s" else x).astype(dtype)


def shift(name: str, kind: str) -> Function:
    """The result of a shift by the width or more: all zeros, or all signs."""
    width = int(kind[1:])

    def run(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        amount = np.minimum(by, np.uint32(width - 1)).astype(x.dtype)
        if kind.startswith("s"):
            return (signed(x) >> amount.astype(signed(x).dtype)).view(x.dtype)
        moved = x << amount if name == "shl" else x >> amount
        return np.where(by >= width, x.dtype.type(0), moved)

    return run


def funnel(left: bool) -> Function:
    """shf.wrap: a word of two, moved by the last five bits of `by`: the upper one, or the lower."""

    def run(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        both, amount = joined(low, high, np.uint64), by.astype(np.uint64) & np.uint64(31)
        return (both << amount >> np.uint64(32) if left else both >> amount).astype(np.uint32)

    return run


def permuted(low: np.ndarray, high: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """prmt.b32: four of eight bytes, or of each its sign in all bits, by a nibble each."""
    both, out = joined(low, high, np.uint64), np.zeros_like(low)
    for i in range(4):
        nibble = (chosen >> np.uint32(4 * i)).astype(np.uint64) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint64(7)))) & np.uint64(255)
        sign = np.where(byte >> np.uint64(7) == 1, np.uint64(255), np.uint64(0))
        found = np.where(nibble >> np.uint64(3) == 1, sign, byte).astype(np.uint32)
        out = out | (found << np.uint32(8 * i))
    return out


def bit_field(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    moved = x.astype(np.uint64) >> (start.astype(np.uint64) & np.uint64(255))
    mask = (np.uint64(1) << np.minimum(length, 32).astype(np.uint64)) - np.uint64(1)
    return (moved & mask).astype(np.uint32)


def truncated(x: np.ndarray) -> np.ndarray:
    """cvt.rzi.s32.f32: towards zero, saturated; NaN becomes 0."""
    value = np.nan_to_num(floats(x, "f32").astype(np.float64), nan=0.0)
    return np.clip(np.trunc(value), -(2.0**31), 2.0**31 - 1).astype(np.int32).view(np.uint32)


def comparison(name: str, kind: str) -> Function:
    """setp; comparisons of floats are false where one is NaN, those that end in u are true."""
    if "f" not in kind:
        convert = signed if kind.startswith("s") else np.asarray
        return lambda a, b: getattr(operator, name)(convert(a), convert(b))

    def of_floats(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = floats(a, kind), floats(b, kind)
        unordered = np.isnan(x) | np.isnan(y)
        if name in ("nan", "num"):
            return unordered == (name == "nan")
        found = getattr(operator, name[:2])(x, y)
        return found | unordered if name.endswith("u") else found & ~unordered

    return of_floats


def comparisons(name: str, kind: str) -> dict[str, Operation]:
    """setp alone, and joined with a predicate, of which one side may settle what is undefined."""
    function, letters = comparison(name, kind), _letter(kind) * 2
    whether = {
        "and": (np.logical_and, lambda mask, value: mask | value),
        "or": (np.logical_or, lambda mask, value: mask | ~value),
        "xor": (np.logical_xor, lambda mask, value: np.ones_like(mask | value)),
    }

    def operation(join: Function, may_matter: Function) -> Operation:
        def run(a: np.ndarray, b: np.ndarray, other: np.ndarray) -> np.ndarray:
            return join(function(a, b), other)

        def spread(values: Any, masks: Any) -> np.ndarray:
            mine, other = (masks[0] | masks[1]) != 0, masks[2] != 0
            matters = may_matter(mine, function(*values[:2])) & may_matter(other, values[2])
            return (mine | other) & matters

        return Operation("p", letters + "p", run, spread)

    return {f"setp.{name}.{kind}": Operation("p", letters, function)} | {
        f"setp.{name}.{word}.{kind}": operation(*how) for word, how in whether.items()
    }


def marked(name: str, kind: str) -> Function:
    """set: 1.0 of the same kind where the comparison holds, else 0.0."""
    one = np.uint16(0x3C00 if kind == "f16" else 0x3F80)
    compare = comparison(name, kind)
    return lambda a, b: np.where(compare(a, b), one, np.uint16(0))


def comparison_of_halves(kind: str) -> Operation:
    """Two predicates, the lower half's first; each is undefined where its own half is."""
    equal = comparison("eq", kind)

    def each(function: Function, args: Any) -> tuple[np.ndarray, ...]:
        parts = zip(*(halves(x, np.uint16) for x in args), strict=True)
        return tuple(function(*part) for part in parts)

    return Operation(
        "pp", "ww", lambda *args: each(equal, args),
        lambda _, masks: each(lambda a, b: (a | b) != 0, masks),
    )  # fmt: skip


def _letter(kind: str) -> str:
    return {"16": "h", "32": "w", "64": "d"}[kind[-2:]]


def _table() -> dict[str, Operation]:
    out: dict[str, Operation] = {}

    def add(names: str, results: str, sources: str, function: Function, **more: Any) -> None:
        for name in names.split():
            out[name] = Operation(results, sources, function, **more)

    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        add(f"{name}.f32 {name}.rn.f32", "w", "ww", of_f32(function))
        add(f"{name}.f32x2", "d", "dd", packed(of_f32(function), np.uint32, np.uint64))
        for kind in INTEGERS if name != "mul" else ():
            add(f"{name}.{kind}", _letter(kind), _letter(kind) * 2, function)
    add("fma.rn.f32", "w", "www", of_f32(fma))
    add("fma.rn.f32x2", "d", "ddd", packed(of_f32(fma), np.uint32, np.uint64))
    add("neg.f32", "w", "w", lambda x: x ^ np.uint32(1 << 31))
    add("neg.s32", "w", "w", lambda x: np.uint32(0) - x)
    add("abs.f32", "w", "w", lambda x: x & np.uint32(0x7FFFFFFF))
    add("ex2.approx.f32", "w", "w", exponential, of_hardware=True)
    add("ex2.approx.ftz.f32", "w", "w", partial(exponential, ends=flushed), of_hardware=True)
    add("div.full.f32", "w", "ww", divide, of_hardware=True)
    add("rcp.approx.f32", "w", "w", reciprocal, of_hardware=True)
    for kind in ("f32", "bf16", "f16"):
        add(f"max.NaN.{kind}", _letter(kind), _letter(kind) * 2, largest(kind))
        for name in FLOAT_COMPARISONS:
            out.update(comparisons(name, kind))
    for kind in ("bf16", "f16"):
        add(f"max.NaN.{kind}x2", "w", "ww", packed(largest(kind), np.uint16, np.uint32))
        out[f"setp.eq.{kind}x2"] = comparison_of_halves(kind)
        for name in ("gt", "ge"):
            both = packed(marked(name, kind), np.uint16, np.uint32)
            add(f"set.{name}.{kind}x2.{kind}x2", "w", "ww", both)
        add(f"add.rn.{kind}x2", "w", "ww", packed(sum_of(kind), np.uint16, np.uint32))
        add(f"cvt.f32.{kind}", "w", "h", lambda x, kind=kind: bits32(floats(x, kind)))
        add(f"sub.rn.f32.{kind}", "w", "hw",
            lambda a, b, kind=kind: bits32(floats(a, kind) - floats(b, "f32")))  # fmt: skip
    add("min.NaN.f32", "w", "ww", smallest)
    for kind in ("b16", "b32", "b64", *INTEGERS):
        for name in COMPARISONS[:2] if kind[0] == "b" else COMPARISONS:
            out.update(comparisons(name, kind))
    for name, function in (("min", np.minimum), ("max", np.maximum)):
        add(f"{name}.s32", "w", "ww", to_signed(function))
        add(f"{name}.u32", "w", "ww", function)
    for kind in INTEGERS:
        narrow, wide = _letter(kind), WIDER.get(_letter(kind), "")
        add(f"mul.lo.{kind}", narrow, narrow * 2, np.multiply)
        add(f"mul.hi.{kind}", narrow, narrow * 2, upper_product(kind))
        add(f"mad.lo.{kind}", narrow, narrow * 3, lambda a, b, c: a * b + c)
        add(f"mad.hi.{kind}", narrow, narrow * 3, added(upper_product(kind)))
        if wide:
            add(f"mul.wide.{kind}", wide, narrow * 2, product(kind))
            add(f"mad.wide.{kind}", wide, narrow * 2 + wide, added(product(kind)))
        for other in INTEGERS:
            add(f"cvt.{other}.{kind}", _letter(other), narrow, converted(kind, other))
    for kind, letter in KINDS.items():
        add(f"and.{kind}", letter, letter * 2, np.bitwise_and)
        add(f"or.{kind}", letter, letter * 2, np.bitwise_or)
        add(f"xor.{kind}", letter, letter * 2, np.bitwise_xor)
        add(f"not.{kind}", letter, letter, np.invert)
        add(f"mov.{kind}", letter, letter, np.asarray)
    add("mov.u32", "w", "w", np.asarray)
    for kind in ("b16", "b32", "b64", "f32"):
        letter = _letter(kind)
        add(f"selp.{kind}", letter, letter * 2 + "p", lambda a, b, p: np.where(p, a, b))
    for kinds, name in (("b16 b32 b64", "shl"), ("u16 s16 u32 s32 u64 s64", "shr")):
        for kind in kinds.split():
            add(f"{name}.{kind}", _letter(kind), _letter(kind) + "w", shift(name, kind))
    add("shf.r.wrap.b32", "w", "www", funnel(left=False))
    add("shf.l.wrap.b32", "w", "www", funnel(left=True))
    add("prmt.b32", "w", "www", permuted)
    add("popc.b32", "w", "w", lambda x: np.bitwise_count(x).astype(np.uint32))
    add("bfe.u32", "w", "www", bit_field)
    add("cvt.rn.f16.f32", "h", "w", lambda x: rounded(x, "f16"))
    add("cvt.rn.bf16.f32", "h", "w", lambda x: rounded(x, "bf16"))
    add("cvt.rn.bf16x2.f32", "w", "ww", both_rounded)
    add("cvt.rn.f32.s32", "w", "w", lambda x: bits32(signed(x).astype(np.float32)))
    add("cvt.rn.f32.u32", "w", "w", lambda x: bits32(x.astype(np.float32)))
    add("cvt.rzi.s32.f32", "w", "w", truncated)
    # Generic and global addresses are the same.
    add("cvta.to.global.u64 cvta.global.u64", "d", "d", np.asarray)
    return out


OPERATIONS = _table()
