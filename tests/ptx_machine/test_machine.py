"""The machine that executes PTX, on small programs written by hand: it computes what
the PTX ISA says, and it reports what a program must not do. No GPU compiler is needed here; the
kernels' own PTX is executed by `.ci/heavy ptx`.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from . import host
from .parser import PtxError, parse
from .programs import MODULE, THREADS, run, words

# The largest of 128 floats, as Mosaic GPU has it: shuffles, shared memory, two barriers.
EXCHANGED = "".join(
    f"	shfl.sync.bfly.b32 	%r3, %r2, {by}, 31, -1;\n	max.NaN.f32 	%r2, %r2, %r3;\n"
    for by in (1, 2, 4, 8, 16)
)
LARGEST = f"""
	ld.global.b32 	%r2, [%rd4];
{EXCHANGED}	shr.u32 	%r4, %r1, 5;
	mul.wide.u32 	%rd6, %r4, 4;
	mov.b64 	%rd7, __dynamic_shmem__0;
	add.s64 	%rd6, %rd6, %rd7;
	st.shared.b32 	[%rd6+16], %r2;
	bar.sync 	0;
	ld.shared.v4.b32 	{{%r5, %r6, %r7, %r8}}, [__dynamic_shmem__0+16];
	max.NaN.f32 	%r5, %r5, %r6;
	max.NaN.f32 	%r7, %r7, %r8;
	max.NaN.f32 	%r5, %r5, %r7;
	bar.sync 	0;
	st.shared.b32 	[%rd6+16], %r4;
	setp.gt.f32 	%p1, %r5, 0f00000000;
	@!%p1 bra 	$NEGATIVE;
	st.global.b32 	[%rd5], %r5;
	ret;
$NEGATIVE:
	st.global.b32 	[%rd5], -1;
	ret;
"""


@pytest.fixture
def normal():
    return np.random.default_rng(0).normal(size=THREADS).astype(np.float32)


@pytest.mark.fast
@pytest.mark.parametrize("where", [0, 1, 31, 32, 77, 127])
def test_a_reduction_over_a_warpgroup(normal, where):
    normal[where] = 9
    assert (run(LARGEST, words(normal)).view(np.float32) == 9).all()


def test_debug_sections_are_left_out():
    """Whatever they hold; an unknown line outside of them is an error."""
    debug = "}}\n\t.section\t.debug_str\n\t{{\n$L__info_string0:\n.b8 95,0\n\t}}\n"
    module = MODULE.format(body="\tret;", cluster="")
    assert parse(module + debug.format()) == parse(module + "}")
    with pytest.raises(PtxError, match="not understood"):
        parse(module + ".b8 95,0")


def test_nan_wins_a_maximum_and_loses_a_comparison(normal):
    normal[50] = -np.nan
    assert (run(LARGEST, words(normal)) == 0xFFFFFFFF).all()


SPOILED = (
    # A barrier removed: other warps may not have stored, or not have loaded yet.
    ("bar.sync 	0;\n	ld", "ld", "data race.*loaded without a barrier after a store"),
    ("bar.sync 	0;\n	st", "st", "data race.*stored to without a barrier after a load"),
    # An address four bytes on.
    ("_0+16]", "_0+20]", "not aligned to 16 bytes"),
    ("[%rd4]", "[%rd4+4]", "in .* 512 is outside its 512 bytes"),
    ("[%rd5], %r5", "[%rd5+4], %r5", "out .* 512 is outside its 512 bytes"),
    ("[%rd6+16], %r2", "[%rd6+20], %r2", "depends on .* a value that was never written"),
    # An input is not an output; a result of another width; what is not there.
    ("global.b32 	[%rd5], %r5", "global.b32 	[%rd4], %r5", "is an input and is stored to"),
    ("max.NaN.f32 	%r5, %r5, %r6", "max.NaN.f32 	%rd5, %r5, %r6", "cannot take a result"),
    ("max.NaN.f32 	%r7", "max.f32 	%r7", "unknown instruction max.f32"),
    ("setp.gt.f32", "setp.gt.ftz.f32", "unknown instruction setp.gt.ftz.f32"),
    ("$NEGATIVE:", "$POSITIVE:", "no such label"),
    ("%r3, %r2, 16, 31, -1", "%r3, %r2, 16, 31, 65535", "does not name all lanes"),
    ("%r3, %r2, 1, 31, -1", "%r3, %r2, 1, 15, -1", "only shuffles of whole warps"),
)


def test_threads_that_diverge_meet_again():
    """A loop of another length in each thread, and an if in it: the sum of odd numbers."""
    body = """
	mov.b32 	%r2, 0;
	mov.b32 	%r3, %r1;
$LOOP:
	and.b32 	%r4, %r3, 1;
	setp.eq.b32 	%p1, %r4, 0;
	@%p1 bra 	$EVEN;
	add.s32 	%r2, %r2, %r3;
	bra.uni 	$NEXT;
$EVEN:
	add.s32 	%r2, %r2, 1000;
$NEXT:
	add.s32 	%r3, %r3, -1;
	setp.gt.s32 	%p2, %r3, 0;
	@%p2 bra 	$LOOP;
	shfl.sync.bfly.b32 	%r5, %r2, 1, 31, -1;
	st.global.b32 	[%rd5], %r5;
	ret;
"""
    sums = [1000, *(sum(range(1, i + 1, 2)) + i // 2 * 1000 for i in range(1, THREADS))]
    assert run(body).tolist() == [sums[i ^ 1] for i in range(THREADS)]


def test_lanes_that_come_late_are_waited_for():
    """Odd threads take a way that lies behind the shuffle, and come back to it."""
    body = """
	mov.b32 	%r2, %r1;
	and.b32 	%r4, %r1, 1;
	setp.eq.b32 	%p1, %r4, 1;
	@%p1 bra 	$AWAY;
$HERE:
	shfl.sync.bfly.b32 	%r5, %r2, 1, 31, -1;
	st.global.b32 	[%rd5], %r5;
	ret;
$AWAY:
	add.s32 	%r2, %r2, 1000;
	{}
"""
    expected = [(i ^ 1) + 1000 * (1 - i % 2) for i in range(THREADS)]
    assert run(body.format("bra.uni 	$HERE;")).tolist() == expected
    with pytest.raises(PtxError, match="a lane that the member mask names is not here"):
        run(body.format("ret;"))


SOME = "	setp.lt.u32 	%p1, %r1, 3;\n	@%p1 bra 	$END;\n{}\n$END:\n	ret;\n"
ALL_TO_ONE = "	st.global.b32 	[%rd2], {};\n	ret;"


@pytest.mark.parametrize(
    ("body", "how", "message"),
    [
        (SOME.format("	shfl.sync.bfly.b32 	%r2, %r1, 1, 31, -1;"), {}, "mask names is not here"),
        (SOME.format("	bar.sync 	0;"), {}, "wait for others that left"),
        ("	mov.b32 	%r2, 0;", {}, "past the end"),
        ("$L:\n	mov.b32 	%r2, 0;\n	bra.uni 	$L;", {"max_instructions": 9}, "more than 9"),
        (ALL_TO_ONE.format("%r1"), {}, "different values"),
        (SOME.replace("bra ", "bra.uni ").format(""), {}, "not all threads take a uniform"),
        ("$L:\n$L:\n	ret;", {}, "label [$]L is there twice"),
        *((ALL_TO_ONE.format(7), {"grid": 2, "batches": batches}, "data race")
          for batches in ([[0, 1]], [[0], [1]], [[1], [0]])),
    ],
)  # fmt: skip
def test_what_threads_may_not_do_together(body, how, message):
    with pytest.raises(PtxError, match=message):
        run(body, **how)


def test_threads_of_a_cta_may_store_one_value_to_one_place():
    assert run(ALL_TO_ONE.format(7))[0] == 7


CLUSTER = """
	mov.u32 	%r2, %ctaid.x;
	mul.wide.u32 	%rd6, %r2, 512;
	add.s64 	%rd5, %rd5, %rd6;
	st.global.b32 	[%rd5], %r2;
	barrier.cluster.arrive.release.aligned;
	mov.u32 	%r3, %cluster_ctaid.x;
	setp.ne.b32 	%p1, %r3, 0;
	@%p1 bra 	$END;
	barrier.cluster.wait.acquire.aligned;
	ld.global.b32 	%r4, [%rd5+512];
	st.global.b32 	[%rd5], %r4;
$END:
	ret;"""


def test_the_first_of_a_cluster_sees_what_the_others_wrote():
    for batches in ([[0, 1, 2, 3]], [[2, 3], [0, 1]]):
        out = run(CLUSTER, grid=4, cluster=2, batches=batches)
        assert out.reshape(4, -1)[:, 0].tolist() == [1, 1, 3, 3]


SPOILED_CLUSTER = (
    ("arrive.release", "arrive.relaxed", "data race.*loaded without a barrier"),
    ("\tbarrier.cluster.wait.acquire.aligned;\n", "", "data race.*loaded without a barrier"),
    ("\tbarrier.cluster.arrive.release.aligned;\n", "", "threads wait for others"),
    ("setp.ne.b32", "setp.eq.b32", "data race|outside"),  # not the first goes on
)


@pytest.mark.parametrize(
    ("program", "old", "new", "message"),
    [*((LARGEST, *one) for one in SPOILED), *((CLUSTER, *one) for one in SPOILED_CLUSTER)],
)
def test_a_spoiled_program_is_reported(normal, program, old, new, message):
    assert program.count(old) == 1
    how = {"grid": 4, "cluster": 2} if program == CLUSTER else {"values": words(np.abs(normal))}
    with pytest.raises(PtxError, match=message):
        run(program.replace(old, new), **how)


def test_values_never_written_may_be_loaded_but_not_used():
    load = "	ld.shared.b32 	%r2, [__dynamic_shmem__0];\n	mov.b32 	%r3, 5;\n"
    choose = "	setp.lt.u32 	%p1, %r1, 0;\n	selp.b32 	%r3, %r2, %r3, %p1;\n"
    store = "	st.global.b32 	[%rd5], %r3;\n	ret;"
    assert (run(load + choose + store) == 5).all()
    for use in (
        "	add.s32 	%r3, %r2, %r3;\n" + store,
        "	selp.b32 	%r3, %r2, %r3, %p2;\n" + store,
        "	setp.eq.f16x2 	%p1|%p2, %r2, %r3;\n	selp.b32 	%r3, 1, 0, %p2;\n" + store,
        "	mov.b32 	{%rs1, %rs2}, %r2;\n	mov.b32 	%r3, {%rs1, %rs2};\n" + store,
        "	setp.eq.b32 	%p1, %r2, 0;\n	@%p1 bra 	$E;\n$E:\n	ret;",
        "	mul.wide.u32 	%rd6, %r2, 4;\n	ld.b32 	%r3, [%rd6];\n	ret;",
        "	st.shared.b32 	[__dynamic_shmem__0+4], %r2;\n	bar.sync 	0;\n"
        "	ld.shared.b32 	%r3, [__dynamic_shmem__0+4];\n" + store,
        "	redux.sync.max.s32 	%r3, %r2, -1;\n" + store,
    ):
        with pytest.raises(PtxError, match="a value that was never written"):
            run(load + use)


@pytest.mark.parametrize(("opcode", "settles"), [("and", False), ("or", True)])
def test_a_defined_source_settles_and_and_or(opcode, settles):
    """Whatever the other source is: bit by bit, in either order, in the threads where it does."""
    body = """
	ld.shared.b32 	%r2, [__dynamic_shmem__0];
	setp.eq.b32 	%p1, %r2, 77;
	setp.lt.u32 	%p2, %r1, {below};
	{opcode}.pred 	%p3, {sources};
	selp.b32 	%r3, 1, 0, %p3;
	st.global.b32 	[%rd5], %r3;
	ret;
"""
    below = {settles: THREADS * settles, not settles: THREADS * (not settles)}
    for sources in ("%p1, %p2", "%p2, %p1"):
        settled = run(body.format(opcode=opcode, below=below[settles], sources=sources))
        assert (settled == settles).all()
        for open_ in (below[not settles], THREADS // 2):
            with pytest.raises(PtxError, match="a value that was never written"):
                run(body.format(opcode=opcode, below=open_, sources=sources))
    with pytest.raises(PtxError, match="a value that was never written"):
        run(body.format(opcode=opcode, below=below[settles], sources="%p1, %p1"))

    word = """
	ld.shared.b32 	%r2, [__dynamic_shmem__0];
	{opcode}.b32 	%r2, %r2, {bits};
	mov.b32 	{{%rs1, %rs2}}, %r2;
	mov.b32 	%r3, {{{chosen}, {chosen}}};
	st.global.b32 	[%rd5], %r3;
	ret;
"""
    half = 0xFFFF0000 if settles else 0x0000FFFF  # settles the upper half
    settled = run(word.format(opcode=opcode, bits=half, chosen="%rs2"))
    assert (settled == 0xFFFFFFFF * settles).all()
    with pytest.raises(PtxError, match="a value that was never written"):
        run(word.format(opcode=opcode, bits=half, chosen="%rs1"))


def test_a_warps_largest_float_in_one_instruction():
    """redux.sync.max.NaN, which B200 and newer have: by warp, 0.0 above -0.0, NaN above all."""
    body = """
	ld.global.b32 	%r2, [%rd4];
	redux.sync.max.NaN.f32 	%r3, %r2, -1;
	st.global.b32 	[%rd5], %r3;
	ret;
"""
    values = np.random.default_rng(1).normal(size=(4, 32)).astype(np.float32) - 10
    values[1, 7] = np.nan
    values[2] = -0.0
    values[3] = np.where(np.arange(32) == 9, 0.0, -0.0)
    largest = [words(values[0].max()), 0x7FFFFFFF, 0x80000000, 0]
    out = run(body, words(values).reshape(-1)).reshape(4, 32)
    assert (out == np.array(largest, np.uint32)[:, None]).all()


@pytest.mark.parametrize("space", ["param", "param::entry"])
def test_parameters_of_the_entry_are_read_by_both_names(space):
    body = f"""
	ld.{space}.b64 	%rd6, [out];
	sub.s64 	%rd5, %rd5, %rd2;
	add.s64 	%rd5, %rd5, %rd6;
	st.global.b32 	[%rd5], %r1;
	ret;
"""
    assert (run(body) == np.arange(THREADS)).all()
    with pytest.raises(PtxError, match="unknown instruction"):
        run(body.replace(f"ld.{space}.b64", "ld.param::func.b64"))


def test_election_and_packed_halves():
    body = """
	elect.sync 	%r2|%p1, -1;
	selp.b32 	%r3, 1, 0, %p1;
	mov.b32 	{%rs1, %rs2}, 0x3F80BF80;
	max.NaN.bf16 	%rs3, %rs1, %rs2;
	mov.b32 	%r4, {%rs3, %rs1};
	@%p1 mov.b32 	%r4, 0;
	st.global.b32 	[%rd5], %r4;
	ret;
"""
    for leader in (0, 31):
        out = run(body, leader=leader).reshape(4, 32)
        assert (out[:, leader] == 0).all()
        assert (np.delete(out, leader, axis=1) == 0xBF803F80).all()


HOST = """
define {kind} @kernel_mosaic_gpu({arguments}) {
  %4 = load ptr, ptr {arrays}, align 8
  %5 = getelementptr ptr, ptr {arrays}, i32 1
  %6 = load ptr, ptr %5, align 8
  %7 = alloca { ptr, ptr }, align 8
  %8 = alloca [2 x i64], align 8
  %9 = getelementptr { ptr, ptr }, ptr %7, i32 0, i32 0
  store ptr %6, ptr %9, align 8
  %10 = getelementptr i64, ptr %8, i32 0
  store ptr %9, ptr %10, align 8
  %11 = getelementptr { ptr, ptr }, ptr %7, i32 0, i32 1
  store ptr %4, ptr %11, align 8
  %12 = getelementptr i64, ptr %8, i32 1
  store ptr %11, ptr %12, align 8
{more}
  {launch}
  {end}
}
"""
NUMBERS = "i32 4, i32 3, i32 1, i32 0, i32 0, i32 0, i32 128, i32 1, i32 1, i32 2048"
KINDS = """
  %13 = alloca [2 x i32], align 4
  %14 = getelementptr i32, ptr %13, i32 0
  store i32 0, ptr %14, align 4
  %15 = getelementptr i32, ptr %13, i32 1
  store i32 0, ptr %15, align 4
"""
LAUNCH = f"@mosaic_gpu_launch_kernel(ptr %0, {NUMBERS}"
SPEC = f"@mosaic_gpu_build_kernel_spec(ptr %0, {NUMBERS}, i32 0, i32 2, ptr %8, ptr %13)"
# As three versions of jax write it: the kind, arguments, their arrays, more, the launch, the end.
OF_THREE = "ptr %0, ptr %1, ptr %2", "%2", ""
DIALECTS = {
    "0.10": ("void", *OF_THREE, f"call void {LAUNCH}, ptr %1, ptr %8)", "ret void"),
    "0.11": ("i32", *OF_THREE, f"%13 = call i32 {LAUNCH}, i32 0, ptr %1, ptr %8)", "ret i32 %13"),
    "0.12": ("void", "ptr %0, ptr %1", "%1", KINDS, f"call void {SPEC}", "ret void"),
}


def host_code(version):
    text = HOST
    names = "kind", "arguments", "arrays", "more", "launch", "end"
    for name, value in zip(names, DIALECTS[version], strict=True):
        text = text.replace(f"{{{name}}}", value)
    return "\n".join(line for line in text.splitlines() if line.strip())


@pytest.mark.parametrize("version", DIALECTS)
def test_how_a_kernel_is_launched(version):
    text, launch = host_code(version), f"  {DIALECTS[version][4]}\n"
    assert host.read(text) == host.HostCode((4, 3, 1), 1, 128, 2048, (1, 0))
    assert host.read(text.replace("i32 0, i32 0, i32 0", "i32 4, i32 1, i32 1")).cluster == 4
    refused = [
        ("  ret ", "  call void @other()\n  ret ", "not understood: call void @other"),
        ("i32 1, i32 0", "i32 1, i32 2", "clusters"),
        (launch, launch + launch, "two launches"),
        (launch, "", "no launch"),
        ("i32 2048", "i32 2048, i32 0, i32 0, i32 7", "numbers, not"),
    ]
    if version != "0.10":
        refused.append(("i32 2048, i32 0", "i32 2048, i32 1", "may start before"))
    if version == "0.12":
        said = "3 parameters of 2 kinds are announced, 2 stored"
        refused.append(("i32 2, ptr %8", "i32 3, ptr %8", said))
        refused.append(("store i32 0, ptr %15", "store i32 1, ptr %15", "kind 1 is no buffer"))
    for old, new, message in refused:
        with pytest.raises(PtxError, match=message):
            host.read(text.replace(old, new))


def test_the_readmes_example_runs():
    text = (Path(__file__).parent / "README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    code = code.replace("from ptx_machine", f"from {__package__}")
    scope = {}
    exec(code, scope)
    with pytest.raises(PtxError, match="outside its 512 bytes"):
        exec(code.replace("[%rd5], %r3", "[%rd5+4], %r3"), {})
