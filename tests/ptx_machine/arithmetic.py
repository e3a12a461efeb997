"""What PTX instructions without memory compute: raw bits in, raw bits out, one lane a thread.

float32 operations are IEEE in NumPy as on the GPU; `fma` is rounded once, exactly; a NaN that is
computed has the GPU's bits. Approximate instructions (`ex2.approx`, `div.full`, `rcp.approx`) give
the correctly rounded value, which `Hardware` may move as far as the PTX ISA allows.
"""

import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from . import undefined
from .parser import KINDS, TYPES, WIDER

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
FLOAT_COMPARISONS = (*COMPARISONS, *(f"{name}u" for name in COMPARISONS), "num", "nan")
INTEGERS = tuple(sign + bits for sign in "us" for bits in ("16", "32", "64"))

NAN32, NAN16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)  # what every float operation returns


class Hardware(NamedTuple):
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


class Operation(NamedTuple):
    """results and sources as letters of `TYPES`; a capital one may not be undefined.

    spread: how undefined bits are handed on where `undefined.spread` does not know it.
    of_hardware: the function takes `Hardware` first.
    """

    results: str
    sources: str
    function: Callable[..., Any]
    spread: Callable[..., Any] | None = None
    of_hardware: bool = False


def letter_of(kind: str) -> str:
    return "p" if kind == "pred" else {"16": "h", "32": "w", "64": "d"}[kind[-2:]]


def number(x: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits as numbers of a kind; floats of 16 bits exactly, as float32."""
    if kind == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return x.view(np.float16).astype(np.float32)
    if kind == "f32":
        return x.view(np.float32)
    return x.view(f"i{x.dtype.itemsize}") if kind[0] == "s" else x


def raw(x: np.ndarray, kind: str) -> np.ndarray:
    """Numbers as raw bits: floats with the NaN of the GPU, those of 16 bits rounded, ties to even.

    Of sums that are rounded to 2 p + 2 bits or more before, the rounding to p bits is that of the
    exact sum (Figueroa 1995); float32 has 24, and p is 11 or 8.
    """
    if "f" not in kind:
        return x.astype(TYPES[letter_of(kind)])
    word = np.asarray(x, np.float32).view(np.uint32)
    if kind == "f32":
        return np.where(np.isnan(x), NAN32, word)
    if kind == "f16":
        narrow = word.view(np.float32).astype(np.float16).view(np.uint16)
    else:
        narrow = ((word.astype(np.uint64) + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), NAN16, narrow)


def on(function: Function, kind: str, result: str = "") -> Function:
    """The function of numbers on raw bits of a kind; its result is of that kind or another."""
    return lambda *args: raw(function(*(number(x, kind) for x in args)), result or kind)


def mixed(function: Function, kind: str) -> Function:
    """Of a number of this kind and a float32."""
    return lambda a, b: raw(function(number(a, kind), number(b, "f32")), "f32")


def halves(x: np.ndarray) -> np.ndarray:
    """[..., 2]: the lower and the upper half of each word."""
    return x[..., None].view(f"u{x.dtype.itemsize // 2}")


def joined(low: np.ndarray, high: np.ndarray, wide: type) -> np.ndarray:
    """Words of two halves."""
    return low.astype(wide) | high.astype(wide) << wide(8 * low.dtype.itemsize)


def packed(function: Function) -> Function:
    """On both halves of words."""

    def both(*args: np.ndarray) -> np.ndarray:
        found = np.ascontiguousarray(function(*map(halves, args)))
        return found.view(args[0].dtype)[..., 0]

    return both


def by_half(function: Function) -> Function:
    """Of both halves of words, a result of each."""
    return lambda *args: function(*map(halves, args)).T


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 values, rounded once.

    The product is exact in float64; the sum is rounded to odd there, by the error of an ordinary
    sum (Knuth's two-sum), so that the rounding to float32 is the only one (Boldo, Melquiond 2008).
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)  # towards the exact sum: larger or smaller in size
    odd = np.where(inexact, bits + np.where(away, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    """Subnormals become zero."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def approximate(function: Function, ends: Function = np.asarray) -> Function:
    """Of float32; ends: what becomes of numbers as they come and go."""

    def run(hardware: Hardware, *args: np.ndarray) -> np.ndarray:
        exact = function(*(ends(number(x, "f32")).astype(np.float64) for x in args))
        return raw(ends(hardware.approximate(exact).astype(np.float32)), "f32")

    return run


def extreme(beats: Function, of_zeros: Function, kind: str) -> Function:
    """max.NaN and min.NaN: a NaN if either is one; 0.0 is larger than -0.0."""
    nan = raw(np.float32("nan"), kind)

    def chosen(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = number(a, kind), number(b, kind)
        usual = np.where(x == y, of_zeros(a, b), np.where(beats(x, y), a, b))
        return np.where(np.isnan(x) | np.isnan(y), nan, usual)

    return chosen


def largest(kind: str) -> Function:
    return extreme(operator.gt, operator.and_, kind)


def product(kind: str) -> Function:
    """All bits of a product of integers, in words of twice the width."""
    wide, bits = f"{kind[0].replace('s', 'i')}{int(kind[1:]) // 4}", f"b{2 * int(kind[1:])}"
    return lambda *args: raw(np.multiply(*(number(x, kind).astype(wide) for x in args)), bits)


def shift(function: Function, kind: str) -> Function:
    """The result of a shift by the width or more: all zeros, or all signs."""
    width = int(kind[1:])

    def run(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        moved = raw(function(number(x, kind), np.minimum(by, width - 1)), kind)
        return moved if kind[0] == "s" else moved * (by < width)

    return run


def funnel(moved: Function) -> Function:
    """shf.wrap: a word of two, moved by the last five bits of `by`."""
    return lambda low, high, by: raw(moved(joined(low, high, np.uint64), by & 31), "b32")


def permuted(low: np.ndarray, high: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """prmt.b32: four of eight bytes, or of each its sign in all bits, by a nibble each."""
    nibbles = chosen[..., None] >> np.arange(0, 16, 4, np.uint32) & 15
    both = joined(low, high, np.uint64)[..., None] >> 8 * (nibbles & 7) & 255
    both = np.where(nibbles > 7, both // 128 * 255, both)
    return both.astype(np.uint8, order="C").view(np.uint32)[..., 0]


def bit_field(x: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    mask = (np.uint64(1) << np.minimum(length, 32)) - np.uint64(1)
    return raw(x.astype(np.uint64) >> (start & 255) & mask, "b32")


def truncated(x: np.ndarray) -> np.ndarray:
    """cvt.rzi.s32.f32: towards zero, saturated; NaN becomes 0."""
    whole = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0))
    return np.clip(whole, -(2.0**31), 2.0**31 - 1).astype(np.int32)


def comparison(name: str) -> Function:
    """Comparisons of floats are false where one is NaN, those that end in u are true."""

    def holds(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        unordered = np.isnan(x) | np.isnan(y)
        if name in ("nan", "num"):
            return unordered == (name == "nan")
        return np.where(unordered, name.endswith("u"), getattr(operator, name[:2])(x, y))

    return holds


def joined_comparison(name: str, kind: str, word: str) -> Operation:
    """setp and a predicate, of which one side may settle what is undefined in the other."""
    holds, letters = on(comparison(name), kind, "pred"), letter_of(kind) * 2 + "p"
    join = getattr(operator, f"__{word}__")

    def spread(values: Any, masks: Any) -> np.ndarray:
        both = [holds(*values[:2]), values[2]], [(masks[0] | masks[1]) != 0, masks[2]]
        return undefined.spread(f"{word}.pred", "p", *both)

    return Operation("p", letters, lambda a, b, other: join(holds(a, b), other), spread)


def _table() -> dict[str, Operation]:
    out: dict[str, Operation] = {}
    to_bf16 = on(np.asarray, "f32", "bf16")

    def add(names: str, results: str, sources: str, function: Function, **more: Any) -> None:
        for name in names.split():
            out[name] = Operation(results, sources, function, **more)

    for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply)):
        add(f"{name}.f32 {name}.rn.f32", "w", "ww", on(function, "f32"))
        add(f"{name}.f32x2", "d", "dd", packed(on(function, "f32")))
    add("fma.rn.f32", "w", "www", on(fma, "f32"))
    add("fma.rn.f32x2", "d", "ddd", packed(on(fma, "f32")))
    add("neg.f32", "w", "w", lambda x: x ^ np.uint32(1 << 31))
    add("neg.s32", "w", "w", np.negative)
    add("abs.f32", "w", "w", lambda x: x & np.uint32(0x7FFFFFFF))
    add("ex2.approx.f32", "w", "w", approximate(np.exp2), of_hardware=True)
    add("ex2.approx.ftz.f32", "w", "w", approximate(np.exp2, flushed), of_hardware=True)
    add("div.full.f32", "w", "ww", approximate(np.divide), of_hardware=True)
    add("rcp.approx.f32", "w", "w", approximate(np.reciprocal), of_hardware=True)
    add("min.NaN.f32", "w", "ww", extreme(operator.lt, operator.or_, "f32"))
    for kind in ("f32", "bf16", "f16", "b16", "b32", "b64", *INTEGERS):
        names = FLOAT_COMPARISONS if "f" in kind else COMPARISONS[: 2 if kind[0] == "b" else 6]
        for name in names:
            add(f"setp.{name}.{kind}", "p", letter_of(kind) * 2, on(comparison(name), kind, "pred"))
            for word in ("and", "or", "xor"):
                out[f"setp.{name}.{word}.{kind}"] = joined_comparison(name, kind, word)
    of_two = largest("f32")
    add("max.NaN.f32,3", "w", "www", lambda a, b, c: of_two(of_two(a, b), c))  # of B200 and newer
    for kind in ("f32", "bf16", "f16"):
        add(f"max.NaN.{kind}", letter_of(kind), letter_of(kind) * 2, largest(kind))
    for kind in ("bf16", "f16"):
        add(f"max.NaN.{kind}x2", "w", "ww", packed(largest(kind)))
        add(f"add.rn.{kind}x2", "w", "ww", packed(on(np.add, kind)))
        for name in ("gt", "ge"):  # 1.0 or 0.0
            add(f"set.{name}.{kind}x2.{kind}x2", "w", "ww", packed(on(comparison(name), kind)))
        # Two predicates, the lower half's first; each is undefined where its own half is.
        add(f"setp.eq.{kind}x2", "pp", "ww", by_half(on(comparison("eq"), kind, "pred")),
            spread=lambda _, masks: (halves(masks[0] | masks[1]) != 0).T)  # fmt: skip
        add(f"cvt.f32.{kind}", "w", "h", on(np.asarray, kind, "f32"))
        add(f"cvt.rn.{kind}.f32", "h", "w", on(np.asarray, "f32", kind))
        for name, function in (("add", np.add), ("sub", np.subtract)):
            add(f"{name}.rn.f32.{kind}", "w", "hw", mixed(function, kind))
    for name, function in (("min", np.minimum), ("max", np.maximum)):
        for kind in ("s32", "u32"):
            add(f"{name}.{kind}", "w", "ww", on(function, kind))
    for kind in INTEGERS:
        narrow = letter_of(kind)
        add(f"add.{kind}", narrow, narrow * 2, np.add)
        add(f"sub.{kind}", narrow, narrow * 2, np.subtract)
        add(f"mul.lo.{kind}", narrow, narrow * 2, np.multiply)
        add(f"mad.lo.{kind}", narrow, narrow * 3, lambda a, b, c: a * b + c)
        for other in INTEGERS:
            add(f"cvt.{other}.{kind}", letter_of(other), narrow, on(np.asarray, kind, other))
        if wide := WIDER.get(narrow):
            both, whole = narrow * 2, product(kind)
            add(f"mul.wide.{kind}", wide, both, whole)
            add(f"mul.hi.{kind}", narrow, both, lambda a, b, f=whole: halves(f(a, b))[..., 1])
            add(f"mad.wide.{kind}", wide, both + wide, lambda a, b, c, f=whole: f(a, b) + c)
    for kind, letter in KINDS.items():
        add(f"and.{kind}", letter, letter * 2, np.bitwise_and)
        add(f"or.{kind}", letter, letter * 2, np.bitwise_or)
        add(f"xor.{kind}", letter, letter * 2, np.bitwise_xor)
        add(f"not.{kind}", letter, letter, np.invert)
        add(f"mov.{kind}", letter, letter, np.asarray)
    add("mov.u32", "w", "w", np.asarray)
    for kind in ("b16", "b32", "b64", "f32"):
        letter = letter_of(kind)
        add(f"selp.{kind}", letter, letter * 2 + "p", lambda a, b, p: np.where(p, a, b))
        if kind[0] == "b":
            add(f"shl.{kind}", letter, letter + "w", shift(np.left_shift, kind))
    for kind in INTEGERS:
        add(f"shr.{kind}", letter_of(kind), letter_of(kind) + "w", shift(np.right_shift, kind))
    add("shf.r.wrap.b32", "w", "www", funnel(operator.rshift))
    add("shf.l.wrap.b32", "w", "www", funnel(lambda both, by: both << by >> 32))
    add("prmt.b32", "w", "www", permuted)
    add("popc.b32", "w", "w", lambda x: np.bitwise_count(x).astype(np.uint32))
    add("bfe.u32", "w", "www", bit_field)
    add("cvt.rn.bf16x2.f32", "w", "ww", lambda a, b: joined(to_bf16(b), to_bf16(a), np.uint32))
    add("cvt.rn.f32.s32", "w", "w", on(np.asarray, "s32", "f32"))
    add("cvt.rn.f32.u32", "w", "w", on(np.asarray, "u32", "f32"))
    add("cvt.rzi.s32.f32", "w", "w", on(truncated, "f32", "s32"))
    # Generic and global addresses are the same.
    add("cvta.to.global.u64 cvta.global.u64", "d", "d", np.asarray)
    return out


OPERATIONS = _table()
