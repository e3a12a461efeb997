"""The arithmetic of the machine that executes PTX is the ISA's, bit for bit."""

import math
from fractions import Fraction

import numpy as np
import pytest

from .arithmetic import OPERATIONS, Hardware, fma
from .parser import BITS, TYPES
from .programs import words


def operate(opcode, *sources):
    operation = OPERATIONS[opcode]
    with np.errstate(all="ignore"):
        hardware = (Hardware(),) if operation.of_hardware else ()
        return operation.function(*hardware, *(np.atleast_1d(x) for x in sources))


SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 1.0, -1.5, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.fast
def test_fma_is_rounded_once():
    """Against exact fractions: hard cases for a sum in float64, and random ones."""
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 2**32, (3, 2000), np.uint64).astype(np.uint32).view(np.float32)
    near = np.float32(1) + np.float32(2.0**-23) * rng.integers(0, 2**23, 2000).astype(np.float32)
    a = np.concatenate([a, near, [np.float32(1 + 2.0**-12)] * 2])
    b = np.concatenate([b, near[::-1], [np.float32(1 + 2.0**-12)] * 2])
    tiny = np.float32(2.0**-60)
    c = np.concatenate([c, np.full(2000, tiny), [tiny, -tiny]]).astype(np.float32)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    a, b, c = a[finite], b[finite], c[finite]
    with np.errstate(all="ignore"):
        found = fma(a, b, c)
    assert len(found) > 3000
    for x, y, z, got in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if not np.isfinite(got):
            assert abs(exact) > Fraction(float(np.finfo(np.float32).max))
            continue
        near = [got, *(np.nextafter(got, np.float32(way)) for way in (-np.inf, np.inf))]
        error, *others = (abs(Fraction(float(x)) - exact) for x in near if np.isfinite(x))
        even = got.view(np.uint32) % 2 == 0
        assert error < min(others) or (error == min(others) and even), (x, y, z, got)


def test_approximate_instructions():
    x = np.array(SPECIAL + [-1.0, 10.5, -126.5, -149.0, 128.0], np.float32)
    for opcode in ("ex2.approx.f32", "ex2.approx.ftz.f32"):
        got = operate(opcode, words(x)).view(np.float32)
        for value, result in zip(x, got, strict=True):
            exact = math.inf if value >= 128 else 2.0 ** float(value)
            if opcode == "ex2.approx.ftz.f32" and exact < 2.0**-126:
                exact = 0.0
            np.testing.assert_equal(result, np.float32(exact))
    quotient = operate("div.full.f32", words([1, 1, 0, -3]), words([3, 0, 0, 2]))
    np.testing.assert_array_equal(
        operate("rcp.approx.f32", words([3, 0, np.inf])), words([1 / 3, np.inf, 0])
    )
    np.testing.assert_array_equal(
        quotient.view(np.float32), np.array([1 / 3, np.inf, np.nan, -1.5], np.float32)
    )
    assert quotient[2] == 0x7FFFFFFF


def test_errors_stay_within_the_bound():
    exact = np.random.default_rng(0).uniform(0.5, 4, 1000)
    for direction in ("up", "down", "random"):
        moved = Hardware(errors=direction).approximate(exact).astype(np.float32).astype(np.float64)
        error = (moved - exact) / exact
        assert (np.abs(error) <= 2.0**-22).all()
        assert np.abs(error).max() > 2.0**-23
    assert (Hardware(errors="up").approximate(np.array([0.0, 1.0, np.inf])) == [0, 1, np.inf]).all()


def test_maxima_and_comparisons():
    for x in SPECIAL:
        for y in SPECIAL:
            got = operate("max.NaN.f32", words(x), words(y))[0]
            if np.isnan(x) or np.isnan(y):
                assert got == 0x7FFFFFFF
            elif x == y == 0:  # 0.0 is the larger zero
                assert got == (words(x)[()] & words(y)[()])
            else:
                assert got == words(max(x, y))
            lowest = operate("min.NaN.f32", words(x), words(y))[0]
            opposite = operate("max.NaN.f32", words(-x), words(-y))[0]
            assert lowest == (got if np.isnan(x) or np.isnan(y) else opposite ^ 0x80000000)
            unordered = np.isnan(x) or np.isnan(y)
            assert operate("setp.lt.f32", words(x), words(y))[0] == (x < y)
            assert operate("setp.ne.f32", words(x), words(y))[0] == (x != y and not unordered)
            assert operate("setp.neu.f32", words(x), words(y))[0] == (x != y)
            assert operate("setp.nan.f32", words(x), words(y))[0] == unordered


def f32(value):
    return int(words(value))


# By opcode: sources and the result, as raw bits; a negative number is a word's two's complement.
RESULTS = {
    "shl.b32": [(3, 31, 0x80000000), (3, 32, 0)],
    "shr.s32": [(0x80000000, 40, -1)],
    "shr.u32": [(0x80000000, 31, 1)],
    "shr.u16": [(0x8000, 8, 0x80)],
    "shf.r.wrap.b32": [(0xABCD1234, 0x56, 8, 0x56ABCD12), (0xABCD1234, 0x56, 32, 0xABCD1234)],
    "shf.l.wrap.b32": [(0xABCD1234, 0x56, 8, 0x56AB), (0xABCD1234, 0x56, 33, 0xAD)],
    "bfe.u32": [(0xABCD1234, 8, 12, 0xD12)],
    "mul.wide.s32": [(-2, 3, -6)],
    "mul.wide.u32": [(2**32 - 2, 3, 3 * (2**32 - 2))],
    "mul.wide.s16": [(-2, 3, -6)],
    "mul.lo.s32": [(2**31, 3, 2**31)],
    "mul.lo.s16": [(430, 500, 430 * 500 % 2**16)],
    "mul.lo.u64": [(2**63 + 5, 2, 10)],
    "mul.hi.u32": [(2**32 - 1, 2**31 + 1, 2**31)],
    "mul.hi.s32": [(-1, 3, -1)],
    "mul.hi.u16": [(430, 500, 430 * 500 >> 16)],
    "mul.hi.s16": [(-430, 500, -430 * 500 >> 16)],
    "mad.lo.s64": [(-3, 4, 5, -7)],
    "mad.lo.u32": [(2**31, 3, 2**31, 0)],
    "mad.wide.s32": [(-2, 3, 7, 1)],
    "mad.wide.u16": [(65535, 2, 1, 131071)],
    "cvt.u16.u64": [(2**40 + 3 * 2**16 + 9, 9)],
    "cvt.u16.s64": [(-2, 2**16 - 2)],
    "cvt.s64.s16": [(-2, -2)],
    "cvt.u64.u16": [(-2, 2**16 - 2)],
    "cvt.u32.s16": [(2**15, -(2**15))],
    "add.u64": [(2**64 - 1, 2, 1)],
    "max.s32": [(-1, 5, 5)],
    "min.u32": [(-1, 5, 5)],
    "neg.f32": [(f32(-0.0), 0)],
    "neg.s32": [(1, -1)],
    "setp.gt.u16": [(0x8000, 1, True)],
    "setp.lt.s16": [(0x8000, 1, True)],
    "setp.num.f32": [(f32(1), f32(np.nan), False)],
    "cvt.f32.bf16": [(0xC040, 0xC0400000)],
    "cvt.f32.f16": [(0x0001, f32(2.0**-24)), (0xFE01, 0x7FFFFFFF)],
    # A tie goes to the even one.
    "cvt.rn.f16.f32": [(f32(1 + 2.0**-11), 0x3C00), (f32(65520), 0x7C00), (f32(np.nan), 0x7FFF)],
    "cvt.rn.bf16.f32": [(f32(1 + 3 * 2.0**-8), 0x3F82)],
    "cvt.rn.bf16x2.f32": [
        (f32(1 + 2.0**-8), f32(1 + 3 * 2.0**-8), 0x3F803F82),
        (f32(-3.4e38), f32(np.nan), 0xFF807FFF),
    ],
    "cvt.rn.f32.s32": [(-16777217, f32(-16777216))],
    "cvt.rn.f32.u32": [(2**32 - 129, f32(2.0**32 - 256)), (2**24 + 1, f32(2.0**24))],
    "cvt.rzi.s32.f32": [(f32(-1.9), -1), (f32(3e9), 2**31 - 1), (f32(np.nan), 0)],
    "add.f32": [(f32(1e-40), f32(1e-40), f32(np.float32(1e-40) * 2))],
    "sub.f32": [(f32(np.inf), f32(np.inf), 0x7FFFFFFF)],
    "add.rn.f32.bf16": [(0x4040, f32(1), f32(4))],
    "sub.rn.f32.bf16": [(0x4040, f32(1), f32(2))],
    "sub.f32x2": [(0x40400000_3F800000, 0x3F800000_3F800000, 2**62)],
    "prmt.b32": [
        (0x33221180, 0x77665544, 0x7058, 0x778055FF), (0x33221180, 0x776655C4, 0x9CD8, 0x00FF00FF),
    ],
    # Halves: 1.0 > -1.0, and NaN is above nothing; -0.0 >= 0.0, 1.0 < 1.0078125.
    "set.gt.bf16x2.bf16x2": [(0x3F807FC0, 0xBF803F80, 0x3F800000)],
    "set.ge.bf16x2.bf16x2": [(0x80003F80, 0x00003F81, 0x3F800000)],
    "set.gt.f16x2.f16x2": [(0x3C003C01, 0x3C003C00, 0x00003C00)],
    "set.ge.f16x2.f16x2": [(0x3C007E00, 0x3C007E00, 0x3C000000)],
    # 3 + 4; 256 + 1 is a tie, which goes to the even one.
    "add.rn.bf16x2": [(0x40404380, 0x40803F80, 0x40E04380)],
    "add.rn.f16x2": [(0x3C007BFF, 0x3C007BFF, 0x40007C00)],
    "fma.rn.f32x2": [(*[0x3F800000_40400000] * 3, 0x40000000_41400000)],
    "max.NaN.f32,3": [(f32(-2), f32(5), f32(3), f32(5)), (f32(2), 0, f32(np.nan), 2**31 - 1)],
    "max.NaN.bf16x2": [(0x3F80FFC0, 0xBF803F80, 0x3F807FFF)],
}  # fmt: skip


@pytest.mark.parametrize("opcode", RESULTS)
def test_operations(opcode):
    for *sources, result in RESULTS[opcode]:
        letters = OPERATIONS[opcode].sources + OPERATIONS[opcode].results
        *given, expected = (
            np.array(x % 2 ** BITS[letter], np.uint64).astype(TYPES[letter])
            for x, letter in zip((*sources, result), letters, strict=True)
        )
        assert operate(opcode, *given)[0] == expected


@pytest.mark.parametrize(
    ("word", "join"), [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)]
)
def test_comparisons_joined_with_a_predicate(word, join):
    """The value; and what one side cannot settle is undefined where the other side is."""
    operation = OPERATIONS[f"setp.lt.{word}.u32"]
    full, none, zero = np.array([~np.uint32(0)]), np.array([np.uint32(0)]), np.array([False])
    for small in (True, False):
        for other in (True, False):
            a, b = np.array([np.uint32(not small)]), np.array([np.uint32(1)])
            c = np.array([other])
            assert operation.function(a, b, c)[0] == join(small, other)
            settles = {"and": not other, "or": other, "xor": False}[word]
            assert operation.spread([a, b, c], [full, none, zero])[0] == (not settles)
            settles = {"and": not small, "or": small, "xor": False}[word]
            assert operation.spread([a, b, c], [none, none, ~zero])[0] == (not settles)
            assert operation.spread([a, b, c], [none, full, ~zero])[0]
            assert not operation.spread([a, b, c], [none, none, zero])[0]
