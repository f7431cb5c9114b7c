"""The executor of PTX by itself: what instructions compute, and each fault that it must
see.
"""

import re

import numpy as np
import pytest
import torch
from ptx import Fault, Kernel, Machine, Unknown

THREADS = 64
TEXT = """
.visible .entry probe(
	.param .u64 .ptr .global .align 1 probe_param_0,
	.param .u64 .ptr .global .align 1 probe_param_1,
	.param .f32 probe_param_2
)
.reqntid 64
{
	ld.param.b64 	%rd1, [probe_param_0];
	ld.param.b64 	%rd2, [probe_param_1];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	shl.b32 	%r2, %r1, 2;
	xor.b32 	%r3, %r2, 4;
	xor.b32 	%r4, %r2, 128;
	setp.lt.u32 	%p1, %r1, 16;
BODY
	ret;
}
"""
LOAD, STORE = "ld.global.b32 %r9, [%rd4];", "st.global.b32 [%rd5], %r9;"
COPY = "cp.async.ca.shared.global [%r2], [%rd4], 0x4; cp.async.commit_group;"


def launch(
    body,
    source=None,
    target=None,
    grid=(1, 1, 1),
    shared=256,
    threads=THREADS,
    **options,
):
    """Run a kernel in which thread t has its element of source at %rd4, of target at
    %rd5, and 4 * t in %r2.
    """
    source = torch.arange(THREADS, dtype=torch.int32) if source is None else source
    target = torch.full((THREADS,), -1, dtype=torch.int32) if target is None else target
    text = TEXT.replace("reqntid 64", f"reqntid {threads}")
    text = text.replace("BODY", body if "\n" in body else body.replace("; ", ";\n"))
    Machine(**options).launch(Kernel(text), grid, shared, [source, target, 0.5])
    return target


# Each line does what must not be done; what it says must be found in the fault.
FAULTS = {
    "read behind a tensor": ("ld.global.b32 %r9, [%rd4+4];", "outside of argument 0"),
    "read of nothing": (
        "mov.b64 %rd9, 0; ld.global.b32 %r9, [%rd9];",
        "outside of every argument",
    ),
    "write behind a tensor": (
        LOAD + " st.global.b32 [%rd5+4], %r9;",
        "outside of argument 1",
    ),
    "misaligned read": ("ld.global.b32 %r9, [%rd4+2];", "misaligned"),
    "misaligned vector": (
        "ld.global.v4.b32 {%r9, %r10, %r11, %r12}, [%rd4];",
        "misaligned",
    ),
    "an element left out": (
        LOAD + " @%p1 " + STORE,
        "48 elements of argument 1 are not written",
    ),
    "an element twice": (LOAD + STORE + STORE, "written twice"),
    "read of what is written": (
        LOAD + STORE + " ld.global.b32 %r9, [%rd5];",
        "written and, as argument 1, read",
    ),
    "uninitialised register": (
        "st.global.b32 [%rd5], %r9;",
        "an uninitialised value is stored",
    ),
    "uninitialised shared memory": (
        "ld.shared.b32 %r9, [%r2]; " + STORE,
        "an uninitialised value is stored",
    ),
    "uninitialised by way of shared memory": (
        "st.shared.b32 [%r2], %r8; ld.shared.b32 %r9, [%r2]; " + STORE,
        "uninit",
    ),
    "uninitialised address": ("ld.global.b32 %r9, [%rd9];", "an uninitialised address"),
    "uninitialised branch": ("@%p2 bra $L1;\n$L1:\n", "an uninitialised value decides"),
    "shuffle of nothing": (
        "shfl.sync.bfly.b32 %r9, %r8, 1, 31, -1; " + STORE,
        "an uninitialised value is stored",
    ),
    "read without a barrier": (
        "st.shared.b32 [%r2], %r1; ld.shared.b32 %r9, [%r3];",
        "race on shared memory",
    ),
    "read of another warp": (
        "st.shared.b32 [%r2], %r1; ld.shared.b32 %r9, [%r4];",
        "race on shared memory",
    ),
    "written while read": (
        "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r9, [%r4]; st.shared.b32 [%r2], %r9;",
        "race on shared memory",
    ),
    "unlike values to one place": (
        "mov.b32 %r9, 0; st.shared.b32 [%r9], %r1;",
        "race on shared memory",
    ),
    "shared memory outside": (
        "st.shared.b32 [%r2+4], %r1;",
        "outside of shared memory",
    ),
    "copy read at once": (
        COPY + " ld.shared.b32 %r9, [%r2];",
        "before an asynchronous copy",
    ),
    "copy waited for in vain": (
        COPY + " cp.async.wait_group 1; ld.shared.b32 %r9, [%r2];",
        "before an asynchronous",
    ),
    "copy not committed": (
        COPY.partition(" cp.async.commit")[0]
        + " cp.async.wait_group 0; ld.shared.b32 %r9, [%r2];",
        "before an asynchronous copy",
    ),
    "copy over a copy": (COPY + COPY, "before an asynchronous copy"),
    "copy over what is read": (
        "st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r9, [%r4]; " + COPY,
        "race on shared memory",
    ),
    "copy from outside": (
        "cp.async.ca.shared.global [%r2], [%rd4+4], 0x4;",
        "outside of argument 0",
    ),
    "barrier of some": (
        "@%p1 bra $L1; bar.sync 0;\n$L1:\n",
        "some threads of a program are elsewhere",
    ),
    "shuffle of some": (
        "@%p1 bra $L1; shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;\n$L1:\n",
        "some threads of a warp are elsewhere",
    ),
    "division by zero": ("mov.b32 %r8, 0; div.u32 %r9, %r1, %r8;", "division by zero"),
    "endless loop": ("$L1:\nbra $L1;\n", "endless loop"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_seen(name):
    body, message = FAULTS[name]
    with pytest.raises(Fault, match=f"^probe: .*{re.escape(message)}"):
        launch(body)


def test_a_fault_names_the_statement():
    with pytest.raises(Fault, match=r"\[ld.global.b32 %r9, \[%rd4\+4\]\]"):
        launch("ld.global.b32 %r9, [%rd4+4];")


# what a thread of the other warp wrote
PARTNER = "ld.shared.b32 %r8, [%r4]; xor.b32 %r9, %r8, 32; " + STORE
FINE = {
    "what a thread wrote itself": "st.shared.b32 [%r2], %r1; ld.shared.b32 %r9, [%r2]; "
    + STORE,
    "a barrier between": "st.shared.b32 [%r2], %r1; bar.sync 0; " + PARTNER,
    "equal values to one place": "mov.b32 %r8, 0; st.shared.b32 [%r8], %r8; mov.b32 %r9, %r1; "
    + STORE,
    "a copy": COPY + " cp.async.wait_group 0; ld.shared.b32 %r9, [%r2]; " + STORE,
    "a copy of another thread": COPY + " cp.async.wait_all; bar.sync 0; " + PARTNER,
    "uninitialised lanes that nobody uses": "@%p1 mov.b32 %r8, %r1; add.s32 %r9, %r8, 1; mov.b32 %r9, %r1; "
    + STORE,
    "a branch": "mov.b32 %r9, %r1; @%p1 bra $L1; add.s32 %r9, %r9, 0;\n$L1:\nbar.sync 0;\n"
    + STORE,
}


@pytest.mark.parametrize("name", FINE)
def test_what_is_allowed_is_done(name):
    assert torch.equal(launch(FINE[name]), torch.arange(THREADS, dtype=torch.int32))


def test_programs_that_write_to_one_place_are_a_race():
    with pytest.raises(Fault, match="written twice"):
        launch(LOAD + STORE, grid=(2, 1, 1))


def test_the_gaps_of_a_view_are_none_of_it():
    both = torch.arange(4 * THREADS, dtype=torch.int32).view(2, -1)
    assert torch.equal(launch(LOAD + STORE, both[:, :THREADS]), both[0, :THREADS])
    with pytest.raises(Fault, match="between the rows of argument 0"):
        launch("ld.global.b32 %r9, [%rd4+4];" + STORE, both[:, :THREADS])


def test_a_tensor_that_is_read_and_written_by_two_names_is_refused():
    x = torch.arange(THREADS, dtype=torch.int32)
    with pytest.raises(Fault, match="argument 1 is written and, as argument 0, read"):
        launch(LOAD + STORE, x, x)


def test_a_launch_that_may_write_where_it_reads_tells_how_many_bytes_it_moved():
    x, moved = torch.arange(THREADS, dtype=torch.int32), []
    launch(
        "ld.global.b32 %r9, [%rd5]; add.s32 %r9, %r9, 1; " + STORE,
        x,
        x,
        in_place=True,
        watch=moved.append,
    )
    assert x.tolist() == list(range(1, THREADS + 1)) and moved == [2 * 4 * THREADS]


@pytest.mark.parametrize(
    "statement",
    [
        "tex.1d.v4 %r9;",
        "bar.sync 1;",
        "add.sat.s32 %r9, %r1, %r1;",
        "fma.rz.f32 %r9, %r1, %r1, %r1;",
        "mov.u32 %r9, %laneid;",
        "ld.volatile.global.b32 %r9, [%rd4];",
    ],
)
def test_what_is_not_known_is_an_error(statement):
    with pytest.raises(Unknown):
        launch(statement)


def computed(statement, *operands, blurred=False):
    """What an instruction makes of 32-bit operands, each an array that is repeated."""
    operands = [np.resize(operand, THREADS).view(np.int32) for operand in operands]
    loads = []
    for k in range(len(operands)):
        loads.append(f"ld.global.b32 %r{20 + k}, [%rd4+{4 * THREADS * k}];")
    source = torch.from_numpy(np.concatenate(operands))
    body = "\n".join([*loads, statement, STORE])
    return launch(body, source, blurred=blurred).numpy()


def floats(*values):
    return np.array(values, np.float32)


def test_a_fused_multiply_add_rounds_once():
    a = 1 + 2.0**-12  # the square is halfway between two float32 numbers
    x, z = floats(a, a, a, 1e30), floats(0, 2.0**-60, -(2.0**-60), 1)
    got = computed("fma.rn.f32 %r9, %r20, %r20, %r21;", x, z)[:4].view(np.float32)
    even = np.float32(1 + 2.0**-11)
    assert got.tolist() == [even, np.nextafter(even, np.float32(2)), even, np.inf]


EDGES = floats(
    0.0,
    -0.0,
    1.0,
    1.00390625,
    1.01171875,
    -3.4e38,
    3.4e38,
    np.inf,
    -np.inf,
    np.nan,
    1e-40,
    65504.0,
    65520.0,
    6e-8,
    0.1,
    -0.3,
)


HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.parametrize("name", HALVES)
def test_halves_are_rounded_as_torch_rounds_them(name):
    spread = torch.randn(THREADS - len(EDGES)) * 100
    values = np.concatenate([EDGES, spread.numpy()])
    got = computed(f"cvt.rn.{name}x2.f32 %r9, %r20, %r21;", values, values)
    halves = torch.from_numpy(got.view(np.int16).copy()).view(HALVES[name])
    expected = torch.from_numpy(values).to(HALVES[name])
    assert_same(halves, expected.repeat_interleave(2))
    back = computed(f"mov.b32 {{%rs1, %rs2}}, %r20;\ncvt.f32.{name} %r9, %rs1;", got)
    assert_same(torch.from_numpy(back.view(np.float32).copy()), expected.float())


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("operator", EXACT)
def test_arithmetic_of_halves_rounds_once(name, operator):
    a, b, c = (torch.randn(2 * THREADS).to(HALVES[name]) for _ in range(3))
    c[:8] = (a[:8].double() * b[:8].double() * 2.0**-9).to(c.dtype)  # nearly halfway
    operands = [a, b, c] if operator == "fma" else [a, b]
    registers = ", ".join(["%r20", "%r21", "%r22"][: len(operands)])
    pairs = [half.view(torch.int32).numpy() for half in operands]
    got = computed(f"{operator}.rn.{name}x2 %r9, {registers};", *pairs)
    exact = EXACT[operator](*[half.double() for half in operands])
    assert torch.equal(torch.from_numpy(got.copy()).view(a.dtype), exact.to(a.dtype))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("eq", [1, 1, 0, 0]), ("neu", [0, 0, 1, 1]), ("gt", [0, 0, 0, 1])],
)
def test_halves_are_compared_as_numbers(name, expected):
    """-0 equals 0, and NaN differs from itself; of a pair each half has a predicate of
    its own.
    """
    one, nan, zero, minus = 0x3F80, 0x7FC0, 0x0000, 0x8000
    a = np.array([zero, one, nan, one], np.int32)
    b = np.array([minus, one, nan, zero], np.int32)
    select = "selp.b32 %r9, 1, 0, "
    alone = f"""mov.b32 {{%rs1, %rs2}}, %r20;
        mov.b32 {{%rs3, %rs4}}, %r21;
        setp.{name}.bf16 %p2, %rs1, %rs3;
        {select}%p2;"""
    assert computed(alone, a, b)[:4].tolist() == expected
    pair = f"setp.{name}.bf16x2 %p2|%p3, %r20, %r21;\n{select}"
    assert computed(pair + "%p2;", a, b)[:4].tolist() == expected
    assert computed(pair + "%p3;", a << 16, b << 16)[:4].tolist() == expected


@pytest.mark.parametrize(
    ("chosen", "expected"), [("0x7632U", 0x4049_3F80), ("0x00C4", 0x3434_0078)]
)
def test_bytes_are_picked_out_of_two_registers(chosen, expected):
    """0x7632 takes the upper half of either, as a chip without bfloat16 packs two; the
    fourth bit asks for a sign.
    """
    a, b = np.array([0x3F80_1234], np.int32), np.array([0x4049_5678], np.int32)
    assert computed(f"prmt.b32 %r9, %r20, %r21, {chosen};", a, b)[0] == expected


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("abs.ftz.f32 %r9, %r20;", [0, 0, 0.25, 0.25]),
        ("rcp.approx.ftz.f32 %r9, %r20;", [np.inf, -np.inf, 4, -4]),
        ("fma.rn.ftz.f32 %r9, %r20, %r20, %r20;", [0, 0, 0.3125, -0.1875]),
    ],
)
def test_numbers_too_small_to_be_normal_count_as_zero_where_asked(statement, expected):
    small = floats(1e-40, -1e-40, 0.25, -0.25)
    assert computed(statement, small)[:4].view(np.float32).tolist() == expected


def test_nan_is_found_in_either_operand():
    a, b = floats(1, np.nan, 1, np.nan), floats(1, 1, np.nan, np.inf)
    select = "setp.nan.f32 %p2, %r20, %r21;\nselp.b32 %r9, 1, 0, %p2;"
    assert computed(select, a, b)[:4].tolist() == [0, 1, 1, 1]


INTEGERS = [
    ("div.s32 %r9, %r20, %r21;", lambda x, y: int(x / y)),
    ("rem.s32 %r9, %r20, %r21;", lambda x, y: x - int(x / y) * y),
    ("mul.hi.s32 %r9, %r20, %r21;", lambda x, y: x * y >> 32),
    ("mul.lo.s32 %r9, %r20, %r21;", lambda x, y: x * y),
    ("div.u32 %r9, %r20, %r21;", lambda x, y: x % 2**32 // (y % 2**32)),
    ("max.s32 %r9, %r20, %r21;", max),
    ("shr.s32 %r9, %r20, 3;", lambda x, y: x >> 3),
    ("shr.u32 %r9, %r20, 40;", lambda x, y: 0),
    ("and.b32 %r9, %r20, %r21;", lambda x, y: x & y),
    ("bfe.u32 %r9, %r20, 4, 3;", lambda x, y: x >> 4 & 7),
    (
        "mul.wide.s32 %rd9, %r20, %r21;\nshr.s64 %rd8, %rd9, 8;\ncvt.u32.u64 %r9, %rd8;",
        lambda x, y: x * y >> 8,
    ),
]


@pytest.mark.parametrize(("statement", "expected"), INTEGERS)
def test_integers(statement, expected):
    a, b = [-7, 7, -7, 2**31 - 1, 5, -(2**31)], [2, -2, -2, 3, 7, 3]
    got = computed(statement, np.array(a, np.int32), np.array(b, np.int32))
    for result, x, y in zip(got.tolist(), a, b, strict=False):
        assert result % 2**32 == expected(x, y) % 2**32


def test_a_program_of_one_warp_meets_where_its_warp_does():
    written, read = "st.shared.b32 [%r2], %r1; ", "ld.shared.b32 %r9, [%r3]; " + STORE
    both, target = written + "bar.warp.sync -1; " + read, torch.zeros(32).int()
    got = launch(both, target=target, threads=32)
    assert got.tolist() == [t ^ 1 for t in range(32)]
    with pytest.raises(Fault, match="race on shared memory"):
        launch(written + read, target=target, threads=32)
    with pytest.raises(Unknown):
        # of one warp among several the executor knows no barrier
        launch(both)


def test_shuffles_stay_in_their_warp():
    got = launch("shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1; " + STORE)
    assert got.tolist() == [t ^ 16 for t in range(THREADS)]
    shuffle = "shr.u32 %r8, %r1, 1; shfl.sync.idx.b32 %r9, %r1, %r8, 31, -1; "
    got = launch(shuffle + STORE)
    assert got.tolist() == [t & ~31 | t // 2 % 32 for t in range(THREADS)]


def test_approximations_are_blurred_by_an_ulp_where_that_is_asked_for():
    x = np.linspace(0.5, 3, THREADS, dtype=np.float32)
    statement = "ex2.approx.f32 %r9, %r20;"
    plain, moved = computed(statement, x), computed(statement, x, blurred=True)
    exact = (2 ** x.astype(np.float64)).astype(np.float32)
    assert np.array_equal(plain.view(np.float32), exact)
    assert set((moved - plain).tolist()) == {-1, 0, 1}
    rounded = "div.rn.f32 %r9, %r20, %r20;"
    assert np.array_equal(computed(rounded, x), computed(rounded, x, blurred=True))


def test_matrices_are_read_as_four_lanes_a_row():
    """Thread l of a warp gets columns 2 (l % 4) and the next of row l / 4, whatever
    threads gave the rows.
    """
    body = (
        "st.shared.b32 [%r2], %r1; bar.sync 0; and.b32 %r5, %r1, 7; shl.b32 %r6, %r5, 4;"
        " ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r6]; " + STORE
    )
    assert launch(body).tolist() == 2 * list(range(32))
