"""Work of one thread of a kernel, where Pallas has only whole vectors: MLIR, spelt in Python.

Pallas lowers operations of vectors that a warpgroup holds. It has no store to a place that each
thread chooses, no prefix sum and no atomic, so the selection in pass 2 writes a few functions of
its threads by hand. `inline` makes one of them an operation of a Pallas kernel. In it a `Word` is
a 32-bit integer, a float or a truth value of each thread.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any, TypeAlias, overload

import jax
import jax.experimental.mosaic.gpu as mosaic_gpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir.dialects import gpu as mlir_gpu
from jax._src.lib.mlir.dialects import llvm as mlir_llvm
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.extend.mlir import ir as mlir_ir
from jax.extend.mlir.dialects import arith as mlir_arith
from jax.extend.mlir.dialects import math as mlir_math
from jax.extend.mlir.dialects import memref as mlir_memref
from jax.extend.mlir.dialects import scf as mlir_scf
from jax.typing import DTypeLike

from pallas_kernels.backends.mosaic_gpu.compat import GPU, Readable, warp_layout
from pallas_kernels.backends.mosaic_gpu.schedule import WARPGROUP, Index, Layout

# Untyped: what their stubs say does not hold for what jax makes of them.
mgpu: Any = mosaic_gpu
utils: Any = mosaic_utils
ir: Any = mlir_ir
arith: Any = mlir_arith
gpu: Any = mlir_gpu
llvm: Any = mlir_llvm
math: Any = mlir_math
memref: Any = mlir_memref
scf: Any = mlir_scf

WARP = 32
_NOTHING = {"bf16": -0x7F0080, "f16": -0x3FF0400}  # two times -inf, of 16 bits

Value: TypeAlias = mlir_ir.Value  # of a thread: a number, some of them, or a reference
Vector = mosaic_gpu.FragmentedArray  # of a warpgroup; or a scalar of its
Results: TypeAlias = Vector | tuple[Vector, ...] | None
Number: TypeAlias = "Word | int | float | Value | Vector"


def _binary(operation: Callable[[Value, Value], Value]) -> Callable[["Word", Number], "Word"]:
    return lambda self, other: Word(operation(self.value, word(other).value))


def _comparison(signed: str, real: str) -> Callable[["Word", Number], "Word"]:
    """By the names of MLIR's predicates, of integers and of floats."""

    def compare(self: "Word", other: Number) -> "Word":
        right = word(other).value
        if isinstance(self.value.type, ir.F32Type):
            return Word(arith.cmpf(getattr(arith.CmpFPredicate, real), self.value, right))
        return Word(arith.cmpi(getattr(arith.CmpIPredicate, signed), self.value, right))

    return compare


class Word:
    """A value of each thread; operators as int32 in C, comparisons signed, `>>` not."""

    __hash__ = None  # type: ignore[assignment]
    __add__, __sub__, __mul__ = _binary(arith.addi), _binary(arith.subi), _binary(arith.muli)
    __and__, __or__, __xor__ = _binary(arith.andi), _binary(arith.ori), _binary(arith.xori)
    __lshift__, __rshift__ = _binary(arith.shli), _binary(arith.shrui)
    __lt__, __gt__ = _comparison("slt", "OLT"), _comparison("sgt", "OGT")
    __ge__, __eq__ = _comparison("sge", "OGE"), _comparison("eq", "OEQ")  # type: ignore[assignment]
    __ne__ = _comparison("ne", "UNE")  # type: ignore[assignment]

    def __init__(self, value: Value) -> None:
        self.value = value

    def __invert__(self) -> "Word":
        return self ^ -1


def i32() -> mlir_ir.Type:
    """The type of a 32-bit integer."""
    return ir.IntegerType.get_signless(32)  # type: ignore[no-any-return]


def word(value: Number) -> Word:
    """A `Word` of a Python number, of a scalar argument of an inline function, or of MLIR."""
    if isinstance(value, Word):
        return value
    if isinstance(value, int):
        return Word(arith.constant(i32(), value))
    if isinstance(value, float):
        return Word(arith.constant(ir.F32Type.get(), value))
    if isinstance(value, Vector):
        return Word(value.registers.item())
    return Word(value)


def words(vector: Vector) -> list[Word]:
    """A thread's part of a vector, in the order of its registers."""
    found = []
    for register in vector.registers.flat:
        (length,) = ir.VectorType(register.type).shape
        found += [Word(llvm.extractelement(register, word(i).value)) for i in range(length)]
    return found


def element(vector: Value, place: int) -> Word:
    """An element of a vector of MLIR."""
    return Word(llvm.extractelement(vector, word(place).value))


def values(vector: Vector) -> list[Value]:
    """`words` of elements of any kind, in MLIR."""
    return [x.value for x in words(vector)]


def elements_like(vector: Vector, values: Sequence[Word]) -> Vector:
    """A vector in the layout of another one of the same kind, from what a thread holds."""
    registers, place = vector.registers.copy(), 0
    for i, register in enumerate(registers.flat):
        for j in range(ir.VectorType(register.type).shape[0]):
            register = llvm.insertelement(register, values[place].value, word(j).value)
            place += 1
        registers.flat[i] = register
    return Vector(_registers=registers, _layout=vector.layout, _is_signed=vector.is_signed)


def floats_like(vector: Vector, values: Sequence[Word]) -> Vector:
    """float32 in the layout of another vector, from what a thread holds."""
    registers, place = vector.registers.copy(), 0
    for i, register in enumerate(registers.flat):
        count = ir.VectorType(register.type).shape[0]
        wide = llvm.mlir_undef(ir.VectorType.get((count,), ir.F32Type.get()))
        for j in range(count):
            wide = llvm.insertelement(wide, values[place].value, word(j).value)
            place += 1
        registers.flat[i] = wide
    return Vector(_registers=registers, _layout=vector.layout, _is_signed=None)


def kept(vector: Vector, bits: Word) -> Vector:
    """A vector of floats, -inf in elements whose bit is not set; a thread's first one is lowest."""
    registers, place = vector.registers.copy(), 0
    for i, register in enumerate(registers.flat):
        kind = ir.VectorType(register.type)
        nothing = arith.constant(kind.element_type, float("-inf"))
        for j in range(kind.shape[0]):
            at = word(j).value
            is_set = (bits & (1 << place)) != 0
            x = llvm.extractelement(register, at)
            x = arith.select(is_set.value, x, nothing)
            register = llvm.insertelement(register, x, at)
            place += 1
        registers.flat[i] = register
    return Vector(_registers=registers, _layout=vector.layout, _is_signed=vector.is_signed)


def pairs_kept(vectors: Sequence[Vector], bits: Word) -> tuple[Vector, ...]:
    """`kept` of four vectors of which a thread holds 8 numbers of 16 bits, in a byte of bits each.

    A word's two bits become its mask in one instruction: it repeats the uppermost bits of bytes.
    """
    shifted_bits = [bits << i for i in range(8)]
    nothing = word(_NOTHING[dtype_of(vectors[0])])
    found = []
    for i, vector in enumerate(vectors):
        low, high = 8 | i, 12 | i  # the sign of this byte of the first word, and of the second
        chosen = word(low | low << 4 | high << 8 | high << 12)
        halves = []
        for j, x in enumerate(pairs(vector)):
            operands = [shifted_bits[7 - 2 * j], shifted_bits[6 - 2 * j], chosen]
            mask = _computed("prmt.b32 $0, $1, $2, $3;", operands)
            halves.append((x & mask) | (nothing & ~mask))
        found.append(_of_pairs(vector, halves))
    return tuple(found)


def _of_pairs(vector: Vector, halves: Sequence[Word]) -> Vector:
    """A vector like another one, from words of two numbers; a register has an even number."""
    registers, place = vector.registers.copy(), 0
    for i, register in enumerate(registers.flat):
        kind = ir.VectorType(register.type)
        count = kind.shape[0] // 2
        several = llvm.mlir_undef(ir.VectorType.get((count,), i32()))
        for j in range(count):
            several = llvm.insertelement(several, halves[place].value, word(j).value)
            place += 1
        registers.flat[i] = llvm.bitcast(kind, several)
    return Vector(_registers=registers, _layout=vector.layout, _is_signed=None)


def one_each(
    value: Word, layout: Layout, shape: tuple[int, ...], signed: bool | None = None
) -> Vector:
    """A vector in a layout in which a thread holds one element, this value; signed: of integers."""
    tiled = layout.to_mgpu()
    registers = np.full(tiled.registers_shape(shape), _of_one(value), dtype=object)
    return Vector(_registers=registers, _layout=tiled, _is_signed=signed)


def vector_of(registers: Sequence[Word | Value], layout: Layout, shape: tuple[int, ...]) -> Vector:
    """A vector from a thread's registers, in their order: vectors of MLIR, or integers."""
    found = [_of_one(x) if isinstance(x, Word) else x for x in registers]
    tiled = layout.to_mgpu()
    whole = np.array(found, dtype=object).reshape(tiled.registers_shape(shape))
    signed = True if isinstance(registers[0], Word) else None
    return Vector(_registers=whole, _layout=tiled, _is_signed=signed)


def vector_of_floats(values: Sequence[Word], layout: Layout, shape: tuple[int, ...]) -> Vector:
    """`vector_of` of floats, one a register."""
    tiled = layout.to_mgpu()
    registers = np.array([_of_one(x) for x in values], dtype=object)
    registers = registers.reshape(tiled.registers_shape(shape))
    return Vector(_registers=registers, _layout=tiled, _is_signed=None)


def _of_one(value: Word) -> Value:
    """A vector of MLIR that has one element."""
    undefined = llvm.mlir_undef(ir.VectorType.get((1,), value.value.type))
    return llvm.insertelement(undefined, value.value, word(0).value)  # type: ignore[no-any-return]


def scalar(value: Word) -> Vector:
    """A number that all threads agree on, as an inline function returns it."""
    return Vector.splat(value.value, (), is_signed=True)


def thread() -> Word:
    """The thread's number in its warpgroup, which is its program: 0 to 127."""
    return Word(arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x)))


def select(condition: Word, yes: Number, no: Number) -> Word:
    """yes or no."""
    return Word(arith.select(condition.value, word(yes).value, word(no).value))


def select_value(condition: Word, yes: Value, no: Value) -> Value:
    """`select` of numbers of any kind, in MLIR."""
    return arith.select(condition.value, yes, no)  # type: ignore[no-any-return]


def smaller(a: Number, b: Number) -> Word:
    """The minimum of signed integers."""
    return Word(arith.minsi(word(a).value, word(b).value))


def larger(a: Number, b: Number) -> Word:
    """The maximum of signed integers."""
    return Word(arith.maxsi(word(a).value, word(b).value))


def shifted(a: Word, by: int) -> Word:
    """a / 2**by rounded down, of signed integers."""
    return Word(arith.shrsi(a.value, word(by).value))


def lowest_bit(a: Word) -> Word:
    """The number of the lowest bit that is set; 32 for 0."""
    return Word(math.cttz(a.value))


def sum_in_pairs(values: Sequence[Word]) -> Word:
    """The sum of 2**n floats, in pairs."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [Word(arith.addf(a.value, b.value)) for a, b in pairs]
    return values[0]


def sum_of_two(a: Word, b: Word) -> Word:
    """The sum of floats."""
    return Word(arith.addf(a.value, b.value))


def product(a: Word, b: Word) -> Word:
    """The product of floats."""
    return Word(arith.mulf(a.value, b.value))


def fused(a: Word, b: Word, c: Word) -> Word:
    """a * b + c of floats, rounded once."""
    return Word(math.fma(a.value, b.value, c.value))


def larger_float(a: Word, b: Word) -> Word:
    """The maximum of floats; NaN if one of them is."""
    return Word(arith.maximumf(a.value, b.value))


def float_of_digit(x: Word) -> Word:
    """An integer without a sign as the nearest float32."""
    return Word(arith.uitofp(ir.F32Type.get(), x.value))


def sum_over_lanes(x: Word, lanes: int) -> Word:
    """The sum of floats of 2**n neighboring lanes, in pairs; each of them gets it."""
    distance = 1
    while distance < lanes:
        x = sum_in_pairs([x, Word(utils.shfl_bfly(x.value, distance))])
        distance *= 2
    return x


def bits_of(x: Word) -> Word:
    """A float32 as an integer."""
    return Word(arith.bitcast(i32(), x.value))


def float_of(bits: Word) -> Word:
    """The float32 of these bits."""
    return Word(arith.bitcast(ir.F32Type.get(), bits.value))


def as_float32(x: Value) -> Word:
    """A number of 16 or 32 bits, in MLIR, as a float32."""
    if isinstance(x.type, ir.F32Type):
        return Word(x)
    return Word(arith.extf(ir.F32Type.get(), x))


def widened(vector: Vector) -> Vector:
    """A vector of bfloat16, an even number a register, as float32.

    A bfloat16 is the upper half of its float32: one instruction each, from 32-bit words. What LLVM
    makes of a conversion takes two of every other one.
    """
    halves = (half for both in pairs(vector) for half in (both << 16, both & -65536))
    return floats_like(vector, [float_of(half) for half in halves])


def dtype_of(vector: Vector) -> str:
    """PTX's name of a vector's floats of 16 bits."""
    return "bf16" if isinstance(vector.mlir_dtype, ir.BF16Type) else "f16"


def pairs(vector: Vector) -> list[Word]:
    """A thread's part of a vector of 16 bits, an even number a register, two of them a word."""
    found = []
    for register in vector.registers.flat:
        count = ir.VectorType(register.type).shape[0] // 2
        both = llvm.bitcast(ir.VectorType.get((count,), i32()), register)
        found += [Word(llvm.extractelement(both, word(j).value)) for j in range(count)]
    return found


def count_in_pairs(logits: Sequence[Word], limit: Word, kind: str, inclusive: bool) -> Word:
    """How many of some floats, two a word, are above a limit, two a word too; as float32.

    kind: `dtype_of`. A half counts in its own dtype, exactly up to 256.
    """
    compare = f"set.{'ge' if inclusive else 'gt'}.{kind}x2.{kind}x2 $0, $1, $2;"
    ones = [_computed(compare, [x, limit]) for x in logits]
    while len(ones) > 1:
        both = zip(ones[::2], ones[1::2], strict=True)
        ones = [_computed(f"add.rn.{kind}x2 $0, $1, $2;", pair) for pair in both]
    element = ir.BF16Type.get() if kind == "bf16" else ir.F16Type.get()
    halves = llvm.bitcast(ir.VectorType.get((2,), element), ones[0].value)
    return sum_in_pairs([as_float32(llvm.extractelement(halves, word(j).value)) for j in range(2)])


def _computed(text: str, operands: Sequence[Word]) -> Word:
    """A word from words, by an instruction that may be moved."""
    constraints = ",".join(["=r", *["r"] * len(operands)])
    return Word(llvm.inline_asm(i32(), [x.value for x in operands], text, constraints))


def sync_threads() -> None:
    """All threads of the program meet; what was written before is seen after."""
    mgpu.warpgroup_barrier()


def of_numbers(function: Callable[..., jax.Array], *numbers: jax.Array | float) -> jax.Array:
    """A function of vectors, of float32 numbers of the kernel: Pallas has no bits of a number."""
    layout = warp_layout()
    vectors = (lax.broadcast_in_dim(jnp.float32(x), (WARP,), ()) for x in numbers)
    vector = function(*(GPU.layout_cast(x, layout) for x in vectors))

    def body(elements: Vector) -> Vector:
        return Vector.splat(words(elements)[0].value, ())

    kind = result((), jnp.float32, GPU.Layout.WG_SPLAT)
    return inline(body, (vector,), (layout,), kind)


def products(layout: Layout) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Products of float32 vectors in a layout, or one and a number, that nothing contracts."""

    def product_of(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (a, b) if jnp.ndim(a) else (b, a)
        size = a.shape

        def body(a: Vector, b: Vector) -> Vector:
            factors = words(b) if b.shape else [word(b)] * len(words(a))
            products_here = [_rounded_product(x, y) for x, y in zip(words(a), factors, strict=True)]
            return elements_like(a, products_here)

        kinds = (layout, layout if jnp.ndim(b) else "scalar")
        return inline(body, (a, b), kinds, result(size, jnp.float32, layout))

    return product_of


def _rounded_product(a: Word, b: Word) -> Word:
    """A product that has its rounding said, so that ptxas contracts it with no sum."""
    text, operands = "mul.rn.f32 $0, $1, $2;", [a.value, b.value]
    return Word(llvm.inline_asm(ir.F32Type.get(), operands, text, "=f,f,f"))


def again(x: jax.Array) -> jax.Array:
    """A number of the kernel as float32, where the kernel says: until then nobody waits for it."""

    def body(value: Vector) -> Vector:
        here, letter = word(value).value, "f"
        kind = here.type
        if kind != ir.F32Type.get():
            here, letter = arith.bitcast(ir.IntegerType.get_signless(16), here), "h"
        move = f"mov.b{32 if letter == 'f' else 16} $0, $1;"
        here = llvm.inline_asm(
            here.type, [here], move, f"={letter},{letter}", has_side_effects=True
        )
        here = here if letter == "f" else arith.bitcast(kind, here)
        return Vector.splat(as_float32(here).value, ())

    kind = result((), jnp.float32, GPU.Layout.WG_SPLAT)
    return inline(body, (x,), ("scalar",), kind)


def pair_again(x: jax.Array) -> jax.Array:
    """`again` of a number of 16 bits, twice in a word."""

    def body(value: Vector) -> Vector:
        bits = arith.bitcast(ir.IntegerType.get_signless(16), word(value).value)
        text = "mov.b32 $0, {$1, $1};"
        return scalar(Word(llvm.inline_asm(i32(), [bits], text, "=r,h", has_side_effects=True)))

    kind = result((), jnp.int32, GPU.Layout.WG_SPLAT)
    return inline(body, (x,), ("scalar",), kind)


def pair_of(vector: jax.Array) -> jax.Array:
    """A number of 16 bits that all lanes hold, in a `warp_layout`, twice in a word."""

    def body(elements: Vector) -> Vector:
        (x,) = words(elements)
        half = arith.extui(i32(), arith.bitcast(ir.IntegerType.get_signless(16), x.value))
        return scalar(Word(half) * 0x10001)

    kind = result((), jnp.int32, GPU.Layout.WG_SPLAT)
    return inline(body, (vector,), (warp_layout(),), kind)


def special(register: str) -> jax.Array:
    """An integer of the chip's, read where the kernel says: until then it takes no register."""

    def body() -> Vector:
        return scalar(_assembled(f"mov.u32 $0, %{register};", "=r", []))

    return inline(body, (), (), result((), jnp.int32, GPU.Layout.WG_SPLAT))


def arrive_in_cluster() -> None:
    """Let those of the cluster that wait for this thread see what it wrote before."""
    _ordered("barrier.cluster.arrive.release.aligned;")


def wait_for_cluster() -> None:
    """Wait until all threads of the cluster have arrived."""
    _ordered("barrier.cluster.wait.acquire.aligned;")


def _ordered(text: str) -> None:
    """An instruction that no access to memory passes."""
    nothing = ir.Type.parse("!llvm.void")
    llvm.inline_asm(nothing, [], text, "~{memory}", has_side_effects=True)


def when(condition: Word, body: Callable[[], None]) -> None:
    """Run the body in threads where the condition holds."""
    branch = scf.IfOp(condition.value)
    with ir.InsertionPoint(branch.then_block):
        body()
        scf.yield_([])


def when_else(condition: Word, body: Callable[[], list[Word]], otherwise: list[Word]) -> list[Word]:
    """The body's values in threads where the condition holds, elsewhere the other values."""
    branch = scf.IfOp(condition.value, [x.value.type for x in otherwise], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([x.value for x in body()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([x.value for x in otherwise])
    return [Word(x) for x in branch.results]


def repeat(
    begin: Number,
    end: Number,
    step: int,
    carry: Sequence[Word],
    body: Callable[[Word, list[Word]], Sequence[Word]],
) -> list[Word]:
    """body(i, carry) -> carry, for i from begin to end."""
    values = [x.value for x in carry]
    loop = scf.ForOp(word(begin).value, word(end).value, word(step).value, values)
    with ir.InsertionPoint(loop.body):
        after = body(Word(loop.induction_variable), [Word(x) for x in loop.inner_iter_args])
        scf.yield_([x.value for x in after])
    return [Word(x) for x in loop.results]


def repeat_while(
    carry: Sequence[Word],
    condition: Callable[[list[Word]], Word],
    body: Callable[[list[Word]], Sequence[Word]],
) -> list[Word]:
    """body(carry) -> carry, as long as condition(carry) holds; each thread on its own."""
    types = [x.value.type for x in carry]
    loop = scf.WhileOp(types, [x.value for x in carry])
    before = loop.before.blocks.append(*types)
    with ir.InsertionPoint(before):
        arguments = [Word(x) for x in before.arguments]
        scf.condition(condition(arguments).value, list(before.arguments))
    after = loop.after.blocks.append(*types)
    with ir.InsertionPoint(after):
        found = body([Word(x) for x in after.arguments])
        scf.yield_([x.value for x in found])
    return [Word(x) for x in loop.results]


def load(ref: Value, index: Number) -> Value:
    """An element of a flat reference, in MLIR."""
    return memref.load(ref, [_index(index)])  # type: ignore[no-any-return]


def store(ref: Value, index: Number, value: Number) -> None:
    """Write an element of a flat reference."""
    memref.store(word(value).value, ref, [_index(index)])


def store_value(ref: Value, index: Number, value: Value) -> None:
    """`store` of a number of any kind, in MLIR."""
    memref.store(value, ref, [_index(index)])


def as_long(high: Word, low: Word) -> Word:
    """A 64-bit integer of two halves."""
    long = ir.IntegerType.get_signless(64)
    upper = arith.shli(arith.extui(long, high.value), arith.constant(long, 32))
    return Word(arith.ori(upper, arith.extui(long, low.value)))


def load_aligned(ref: Value, index: Number, count: int) -> list[Value]:
    """`count` elements from an index that is a multiple of count, in one load; in MLIR."""
    element = ir.MemRefType(ref.type).element_type
    pointer = place(ref, index, element)
    found = llvm.load(ir.VectorType.get((count,), element), pointer)
    return [llvm.extractelement(found, word(i).value) for i in range(count)]


def load_run(ref: Value, index: Number, count: int) -> Value:
    """A vector from an index that is a multiple of count, in MLIR."""
    element = ir.MemRefType(ref.type).element_type
    return llvm.load(ir.VectorType.get((count,), element), place(ref, index, element))  # type: ignore[no-any-return]


def load_or(ref: Value, index: Number, count: int, condition: Word, otherwise: float) -> Value:
    """A vector from an index that is a multiple of count; other values where it does not hold."""
    element = ir.MemRefType(ref.type).element_type
    kind = ir.VectorType.get((count,), element)
    found = load_run(ref, index, count)
    values = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(element, otherwise))
    return arith.select(condition.value, found, arith.constant(kind, values))  # type: ignore[no-any-return]


def load_run_within(
    ref: Value, first: Word, token: Word, there: Word, last: int, vector: int, run: int
) -> list[Value]:
    """A thread's run of a row's logits, in vectors; -inf from id `last` on, where nothing is read.

    The row starts at `first`, the run at id `token`, if it is `there`.
    """
    loaded = []
    for i in range(0, run, vector):
        place = first + smaller(token + i, last - vector)
        inside = there & (token + i < last)
        loaded.append(load_or(ref, place, vector, inside, float("-inf")))
    return loaded


def load_floats(ref: Value, index: Number, count: int) -> list[Word]:
    """`count` elements of 16 bytes from an index that is a multiple of count, as float32."""
    element = ir.MemRefType(ref.type).element_type
    if not isinstance(element, ir.BF16Type):
        return [as_float32(x) for x in load_aligned(ref, index, count)]
    # A bfloat16 is the upper half of its float32: one instruction each, from 32-bit words.
    found = llvm.load(ir.VectorType.get((count // 2,), i32()), place(ref, index, element))
    both = [Word(llvm.extractelement(found, word(i).value)) for i in range(count // 2)]
    return [float_of(half) for x in both for half in (x << 16, x & -65536)]


def add_atomically(ref: Value, index: Number, by: Number) -> Word:
    """Add to an integer in shared memory; its value before."""
    pointer = place(ref, index, i32())
    return _assembled("atom.shared.add.u32 $0, [$1], $2;", "=r,l,r", [pointer, word(by).value])


def sum_of_warp(x: Word) -> Word:
    """The sum of integers of all lanes of a warp; each of them gets it."""
    return _assembled("redux.sync.add.s32 $0, $1, -1;", "=r,r", [x.value])


def from_lane_below(x: Word, distance: int) -> Word:
    """x of the lane so far below; the lane's own where there is none."""
    return _assembled(f"shfl.sync.up.b32 $0, $1, {distance}, 0, -1;", "=r,r", [x.value])


@overload
def inline(
    function: Callable[..., Results],
    arguments: Sequence[Readable | Index],
    layouts: Sequence[Layout | str | None],
    results: jax.ShapeDtypeStruct,
) -> jax.Array: ...
@overload
def inline(
    function: Callable[..., Results],
    arguments: Sequence[Readable | Index],
    layouts: Sequence[Layout | str | None],
    results: tuple[jax.ShapeDtypeStruct, ...],
) -> tuple[jax.Array, ...]: ...
def inline(
    function: Callable[..., Results],
    arguments: Sequence[Readable | Index],
    layouts: Sequence[Layout | str | None],
    results: jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...],
) -> Any:
    """Call a function of threads in a Pallas kernel.

    Args:
      function: gets its arguments as references and values of MLIR; returns what `results` says.
      arguments: references; vectors; scalars.
      layouts: of each argument: None for a reference, "scalar", or a vector's layout.
      results: `GPU.ShapeDtypeStruct`s, or () for none.
    """
    kinds = {None: GPU.RefType(), "scalar": GPU.Layout.WG_SPLAT}
    types = tuple(kinds[x] if x is None or isinstance(x, str) else x for x in layouts)

    def run(_: mosaic_gpu.LaunchContext, *given: Value | Vector) -> Results:
        return function(*given)

    return GPU.inline_mgpu(arg_types=types, return_type=results)(run)(*arguments)


def result(shape: tuple[int, ...], dtype: DTypeLike, layout: Layout) -> jax.ShapeDtypeStruct:
    """A result's type for `inline`."""
    return GPU.ShapeDtypeStruct(shape, dtype, layout=layout)  # type: ignore[no-any-return]


def _index(index: Number) -> Value:
    return arith.index_cast(ir.IndexType.get(), word(index).value)  # type: ignore[no-any-return]


def place(ref: Value, index: Number, element: mlir_ir.Type) -> Value:
    """The address of an element of a flat reference, in MLIR."""
    return utils.getelementptr(utils.memref_ptr(ref), [word(index).value], element)  # type: ignore[no-any-return]


def _assembled(text: str, constraints: str, operands: Sequence[Value]) -> Word:
    return Word(llvm.inline_asm(i32(), operands, text, constraints, has_side_effects=True))


def load_at_once(ref: Readable, index: Index) -> jax.Array:
    """A number of 32 bits in global memory, loaded where the kernel says.

    Other loads the compilers move to where their results are used, behind a branch that waits for
    another load: then one latency follows the other. A relaxed load of the memory model stays.
    """
    dtype = jnp.dtype(ref.dtype)
    integer = dtype == jnp.int32

    def body(here: Value, at: Vector) -> Vector:
        kind, letter = (i32(), "r") if integer else (ir.F32Type.get(), "f")
        address = place(here, word(at), kind)
        text = "ld.relaxed.gpu.global.b32 $0, [$1];"
        found = llvm.inline_asm(kind, [address], text, f"={letter},l", has_side_effects=True)
        return Vector.splat(found, (), is_signed=True if integer else None)

    kind = result((), dtype, GPU.Layout.WG_SPLAT)
    return inline(body, (ref, index), (None, "scalar"), kind)


def lanes_of(number: int) -> int:
    """The least power of two lanes that hold so many numbers, a warp of them at a time."""
    return min(WARP, 1 << (number - 1).bit_length())


def over_lanes(join: Callable[[Word, Word], Word], vector: jax.Array, lanes: int) -> jax.Array:
    """The values of 2**n neighboring lanes in a `warp_layout`, joined in pairs: a number.

    Each 2**n lanes of the warp hold the same.
    """

    def body(elements: Vector) -> Vector:
        (x,) = words(elements)
        distance = 1
        while distance < lanes:
            x = join(x, Word(utils.shfl_bfly(x.value, distance)))
            distance *= 2
        return Vector.splat(x.value, ())

    kind = result((), jnp.float32, GPU.Layout.WG_SPLAT)
    return inline(body, (vector,), (warp_layout(),), kind)


def load_in_warps(ref: Readable, start: Index, size: int) -> jax.Array:
    """[32] float32 from `start` on, in every warp; beyond `size` of them the last one again.

    They are repeated after as many lanes as `lanes_of` says.
    """

    def body(here: Value, at: Vector) -> Vector:
        lane = thread() & (lanes_of(size) - 1)
        address = place(here, word(at) + smaller(lane, size - 1), ir.F32Type.get())
        text = "ld.relaxed.gpu.global.b32 $0, [$1];"
        found = llvm.inline_asm(ir.F32Type.get(), [address], text, "=f,l", has_side_effects=True)
        return one_each(Word(found), warp_layout(), (32,))

    return inline(body, (ref, start), (None, "scalar"), result((32,), jnp.float32, warp_layout()))


def vector_at_once(ref: Value, index: Number, count: int) -> Value:
    """A vector of whole words, at an index that is a multiple of count, as `load_at_once`."""
    element = ir.MemRefType(ref.type).element_type
    number = count * element.width // 32  # of words
    letters = ", ".join(f"${i}" for i in range(number))
    form = {1: "b32 $0", 2: f"v2.b32 {{{letters}}}", 4: f"v4.b32 {{{letters}}}"}[number]
    whole = i32() if number == 1 else llvm.StructType.get_literal([i32()] * number)
    text = f"ld.relaxed.gpu.global.{form}, [${number}];"
    constraints = ",".join(["=r"] * number) + ",l"
    address = place(ref, index, element)
    found = llvm.inline_asm(whole, [address], text, constraints, has_side_effects=True)
    if number > 1:
        several = llvm.mlir_undef(ir.VectorType.get((number,), i32()))
        for j in range(number):
            one = llvm.extractvalue(i32(), found, [j])
            several = llvm.insertelement(several, one, word(j).value)
        found = several
    return llvm.bitcast(ir.VectorType.get((count,), element), found)  # type: ignore[no-any-return]


def load_run_at_once(ref: Readable, start: Index, size: int, layout: Layout) -> jax.Array:
    """`load_at_once` of a vector in a `compat.run_layout` whose threads load whole words."""
    dtype = jnp.dtype(ref.dtype)
    run = size // WARPGROUP
    vector = gcd(run, 16 // dtype.itemsize)

    def body(here: Value, at: Vector) -> Vector:
        first = word(at) + thread() * run
        loaded = [vector_at_once(here, first + i, vector) for i in range(0, run, vector)]
        return vector_of(loaded, layout, (size,))

    return inline(body, (ref, start), (None, "scalar"), result((size,), dtype, layout))
