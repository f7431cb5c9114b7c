"""The executor of PTX by itself: what instructions compute, and each fault that it must
see.
"""

import re
from fractions import Fraction

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
    "read before a tensor": ("ld.global.b32 %r9, [%rd4+-4];", "outside of argument 0"),
    "read of nothing": ("mov.b64 %rd9, 0; ld.global.b32 %r9, [%rd9];", "outside of every argument"),
    "write behind a tensor": (LOAD + " st.global.b32 [%rd5+4], %r9;", "outside of argument 1"),
    "misaligned read": ("ld.global.b32 %r9, [%rd4+2];", "misaligned"),
    "misaligned vector": ("ld.global.v4.b32 {%r9, %r10, %r11, %r12}, [%rd4];", "misaligned"),
    "half an element": ("ld.global.b16 %rs1, [%rd4];", "part of an element"),
    "an element left out": (LOAD + " @%p1 " + STORE, "48 elements of argument 1 are not written"),
    "an element twice": (LOAD + STORE + STORE, "written twice"),
    "one element by all": (LOAD + " st.global.b32 [%rd2], %r9;", "written twice"),
    "read of what is written": (LOAD + STORE + " ld.global.b32 %r9, [%rd5];", "written and, as argument 1, read"),
    "uninitialised register": ("st.global.b32 [%rd5], %r9;", "an uninitialised value is stored"),
    "register set by some": ("@%p1 mov.b32 %r9, 0; " + STORE, "an uninitialised value is stored"),
    "computed from nothing": ("add.s32 %r9, %r8, 1; " + STORE, "an uninitialised value is stored"),
    "uninitialised shared memory": ("ld.shared.b32 %r9, [%r2]; " + STORE, "an uninitialised value is stored"),
    "uninitialised by way of shared memory": ("st.shared.b32 [%r2], %r8; ld.shared.b32 %r9, [%r2]; " + STORE, "uninit"),
    "uninitialised address": ("ld.global.b32 %r9, [%rd9];", "an uninitialised address"),
    "uninitialised mask": ("@%p2 " + LOAD, "an uninitialised value decides"),
    "uninitialised branch": ("@%p2 bra $L1;\n$L1:\n", "an uninitialised value decides"),
    "shuffle of nothing": ("shfl.sync.bfly.b32 %r9, %r8, 1, 31, -1; " + STORE, "an uninitialised value is stored"),
    "read without a barrier": ("st.shared.b32 [%r2], %r1; ld.shared.b32 %r9, [%r3];", "race on shared memory"),
    "read of another warp": ("st.shared.b32 [%r2], %r1; ld.shared.b32 %r9, [%r4];", "race on shared memory"),
    "written while read": ("st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r9, [%r4]; st.shared.b32 [%r2], %r9;",
                           "race on shared memory"),
    "unlike values to one place": ("mov.b32 %r9, 0; st.shared.b32 [%r9], %r1;", "race on shared memory"),
    "shared memory outside": ("st.shared.b32 [%r2+4], %r1;", "outside of shared memory"),
    "shared memory misaligned": ("st.shared.b32 [%r2+2], %r1;", "misaligned"),
    "copy read at once": (COPY + " ld.shared.b32 %r9, [%r2];", "before an asynchronous copy"),
    "copy waited for in vain": (COPY + " cp.async.wait_group 1; ld.shared.b32 %r9, [%r2];", "before an asynchronous"),
    "copy not committed": (COPY.partition(" cp.async.commit")[0] + " cp.async.wait_group 0; ld.shared.b32 %r9, [%r2];",
                           "before an asynchronous copy"),
    "copy of another thread": (COPY + " cp.async.wait_group 0; ld.shared.b32 %r9, [%r3];", "race on shared memory"),
    "copy over a copy": (COPY + COPY, "before an asynchronous copy"),
    "copy over what is read": ("st.shared.b32 [%r2], %r1; bar.sync 0; ld.shared.b32 %r9, [%r4]; " + COPY,
                               "race on shared memory"),
    "copy from outside": ("cp.async.ca.shared.global [%r2], [%rd4+4], 0x4;", "outside of argument 0"),
    "barrier of some": ("@%p1 bra $L1; bar.sync 0;\n$L1:\n", "some threads of a program are elsewhere"),
    "shuffle of some": ("@%p1 bra $L1; shfl.sync.bfly.b32 %r9, %r1, 1, 31, -1;\n$L1:\n",
                        "some threads of a warp are elsewhere"),
    "division by zero": ("mov.b32 %r8, 0; div.u32 %r9, %r1, %r8;", "division by zero"),
    "endless loop": ("$L1:\nbra $L1;\n", "endless loop"),
}  # fmt: skip


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
    "what a thread wrote itself": "st.shared.b32 [%r2], %r1; ld.shared.b32 %r9, [%r2]; " + STORE,
    "a barrier between": "st.shared.b32 [%r2], %r1; bar.sync 0; " + PARTNER,
    "equal values to one place": "mov.b32 %r8, 0; st.shared.b32 [%r8], %r8; mov.b32 %r9, %r1; " + STORE,
    "a copy": COPY + " cp.async.wait_group 0; ld.shared.b32 %r9, [%r2]; " + STORE,
    "a copy of another thread": COPY + " cp.async.wait_all; bar.sync 0; " + PARTNER,
    "uninitialised lanes that nobody uses": "@%p1 mov.b32 %r8, %r1; add.s32 %r9, %r8, 1; mov.b32 %r9, %r1; " + STORE,
    "a branch": "mov.b32 %r9, %r1; @%p1 bra $L1; add.s32 %r9, %r9, 0;\n$L1:\nbar.sync 0;\n" + STORE,
}  # fmt: skip


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
    ["tex.1d.v4 %r9;", "bar.sync 1;", "add.sat.s32 %r9, %r1, %r1;", "fma.rz.f32 %r9, %r1, %r1, %r1;",
     "mov.u32 %r9, %laneid;", "ld.volatile.global.b32 %r9, [%rd4];"],
)  # fmt: skip
def test_what_is_not_known_is_an_error(statement):
    with pytest.raises(Unknown):
        launch(statement)


def computed(statement, *operands, blurred=False):
    """What an instruction makes of 32-bit operands, each an array or a list that is
    repeated.
    """
    operands = [np.resize(np.asarray(o), THREADS) for o in operands]
    loads = [
        f"ld.global.b32 %r{20 + k}, [%rd4+{4 * THREADS * k}];"
        for k in range(len(operands))
    ]
    source = torch.from_numpy(np.concatenate([o.view(np.int32) for o in operands]))
    return launch(
        "\n".join([*loads, statement, STORE]), source, blurred=blurred
    ).numpy()


def floats(*values):
    return np.array(values, np.float32)


def test_a_fused_multiply_add_rounds_once():
    a = 1 + 2.0**-12  # the square is halfway between two float32 numbers
    x, y, z = (
        floats(a, a, a, 3.1, 1e30),
        floats(a, a, a, -0.7, 1e30),
        floats(0, 2.0**-60, -(2.0**-60), 2.17, 1),
    )
    got = computed("fma.rn.f32 %r9, %r20, %r21, %r22;", x, y, z).view(np.float32)
    for g, p, q, r in zip(got[:4], x, y, z, strict=False):
        exact = Fraction(float(p)) * Fraction(float(q)) + Fraction(float(r))
        others = [np.nextafter(g, np.float32(s * np.inf)) for s in (1, -1)]
        assert all(
            abs(Fraction(float(g)) - exact) <= abs(Fraction(float(o)) - exact)
            for o in others
        )
    assert got[1] > got[0] == got[2] and np.isinf(got[4])


EDGES = floats(0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.4e38, 3.4e38, np.inf, -np.inf, np.nan, 1e-40, 65504.0,
               65520.0, 6e-8, 0.1, -0.3)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)]
)
def test_halves_are_rounded_as_torch_rounds_them(name, dtype):
    torch.manual_seed(0)
    values = np.concatenate([EDGES, (torch.randn(THREADS - len(EDGES)) * 100).numpy()])
    got = computed(f"cvt.rn.{name}x2.f32 %r9, %r20, %r21;", values, values[::-1].copy())
    halves = torch.from_numpy(got.view(np.int16).copy()).view(dtype).view(-1, 2)
    for column, given in ((1, values), (0, values[::-1].copy())):
        expected = torch.from_numpy(given).to(dtype)
        assert torch.equal(halves[:, column].nan_to_num(7), expected.nan_to_num(7))
    back = computed(f"mov.b32 {{%rs1, %rs2}}, %r20;\ncvt.f32.{name} %r9, %rs1;", got)
    assert torch.equal(
        torch.from_numpy(back.view(np.float32).copy()).nan_to_num(7),
        halves[:, 0].float().nan_to_num(7),
    )


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)]
)
@pytest.mark.parametrize("operator", ["add", "sub", "mul", "fma"])
def test_arithmetic_of_halves_rounds_once(name, dtype, operator):
    torch.manual_seed(1)
    a, b, c = (torch.randn(2 * THREADS).to(dtype) for _ in range(3))
    c[:8] = (a[:8].double() * b[:8].double() * 2.0**-9).to(dtype)  # nearly halfway
    given = [t.view(torch.int32).numpy() for t in (a, b, c)][
        : 3 if operator == "fma" else 2
    ]
    registers = ", ".join(f"%r{20 + k}" for k in range(len(given)))
    got = computed(f"{operator}.rn.{name}x2 %r9, {registers};", *given)
    a, b, c = (t.double() for t in (a, b, c))
    exact = {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[operator]
    assert torch.equal(torch.from_numpy(got.copy()).view(dtype), exact.to(dtype))


def test_halves_are_compared_as_numbers():
    """-0 equals 0, and NaN differs from itself; of a pair each half has a predicate of
    its own.
    """
    one, nan, zero, minus = 0x3F80, 0x7FC0, 0x0000, 0x8000
    a, b = (
        np.array([zero, one, nan, one], np.int32),
        np.array([minus, one, nan, zero], np.int32),
    )
    for name, expected in (
        ("eq", [1, 1, 0, 0]),
        ("neu", [0, 0, 1, 1]),
        ("gt", [0, 0, 0, 1]),
    ):
        unpacked = "mov.b32 {%rs1, %rs2}, %r20;\nmov.b32 {%rs3, %rs4}, %r21;\n"
        got = computed(
            f"{unpacked}setp.{name}.bf16 %p2, %rs1, %rs3;\nselp.b32 %r9, 1, 0, %p2;",
            a,
            b,
        )
        assert got[:4].tolist() == expected
        for chosen, pair in (("%p2", a), ("%p3", a << 16)):
            other = b if pair is a else b << 16
            body = f"setp.{name}.bf16x2 %p2|%p3, %r20, %r21;\nselp.b32 %r9, 1, 0, {chosen};"
            assert computed(body, pair, other)[:4].tolist() == expected


def test_bytes_are_picked_out_of_two_registers():
    """0x7632 takes the upper half of either, as a chip without bfloat16 packs two; the
    fourth bit asks for a sign.
    """
    a, b = (
        np.array([0x3F80_1234, 0x0011_2233], np.int32),
        np.array([0x4049_5678, 0x7F00_80FF], np.int32),
    )
    for chosen, expected in (
        ("0x7632U", [0x4049_3F80, 0x7F00_0011]),
        ("0x00C4", [0x3434_0078, 0x3333_FFFF]),
    ):
        assert (
            computed(f"prmt.b32 %r9, %r20, %r21, {chosen};", a, b)[:2].tolist()
            == expected
        ), chosen


def test_numbers_too_small_to_be_normal_count_as_zero_where_asked():
    small = floats(1e-40, -1e-40, 0.25, -0.25)
    expected = {
        "abs.ftz.f32 %r9, %r20;": [0, 0, 0.25, 0.25],
        "rcp.approx.ftz.f32 %r9, %r20;": [np.inf, -np.inf, 4, -4],
        "ex2.approx.ftz.f32 %r9, %r20;": [
            1,
            1,
            np.float32(2**0.25),
            np.float32(2**-0.25),
        ],
        "fma.rn.ftz.f32 %r9, %r20, %r20, %r20;": [0, 0, 0.3125, -0.1875],
    }
    for statement, values in expected.items():
        assert computed(statement, small)[:4].view(np.float32).tolist() == values, (
            statement
        )
    got = computed("cvt.rn.f32.s32 %r9, %r20;", np.array([-3, 2**24 + 1], np.int32))
    assert got[:2].view(np.float32).tolist() == [-3, 2**24]


def test_nan_is_found_in_either_operand():
    a, b = floats(1, np.nan, 1, np.nan), floats(1, 1, np.nan, np.inf)
    assert computed("setp.nan.f32 %p2, %r20, %r21;\nselp.b32 %r9, 1, 0, %p2;", a, b)[
        :4
    ].tolist() == [0, 1, 1, 1]


def test_integers():
    a, b = [-7, 7, -7, 2**31 - 1, 5, -(2**31)], [2, -2, -2, 3, 7, 3]
    given = np.array(a, np.int32), np.array(b, np.int32)
    pairs = list(zip(a, b, strict=True))
    expected = {
        "div.s32": [int(x / y) for x, y in pairs],
        "rem.s32": [x - int(x / y) * y for x, y in pairs],
        "mul.hi.s32": [x * y >> 32 for x, y in pairs],
        "mul.lo.s32": [x * y for x, y in pairs],
        "div.u32": [x % 2**32 // (y % 2**32) for x, y in pairs],
        "max.s32": list(map(max, a, b)),
        "shr.s32": [x >> (y % 2**32 if y > 0 else 31) for x, y in pairs],
        "shr.u32": [x % 2**32 >> (y if y > 0 else 40) for x, y in pairs],
        "and.b32": [x & y for x, y in pairs],
    }  # fmt: skip
    for name, values in expected.items():
        got = computed(f"{name} %r9, %r20, %r21;", *given)[: len(a)]
        assert [int(g) % 2**32 for g in got] == [v % 2**32 for v in values], name
    got = computed("bfe.u32 %r9, %r20, 4, 3;", given[0])[: len(a)]
    assert got.tolist() == [x >> 4 & 7 for x in a]
    got = computed(
        "mul.wide.s32 %rd9, %r20, %r21;\nshr.s64 %rd8, %rd9, 8;\ncvt.u32.u64 %r9, %rd8;",
        *given,
    )[: len(a)]
    assert got.tolist() == [x * y >> 8 for x, y in pairs]


def test_a_program_of_one_warp_meets_where_its_warp_does():
    written, read = "st.shared.b32 [%r2], %r1; ", "ld.shared.b32 %r9, [%r3]; " + STORE
    both, target = (
        written + "bar.warp.sync -1; " + read,
        torch.zeros(32, dtype=torch.int32),
    )
    assert launch(both, target=target, threads=32).tolist() == [
        t ^ 1 for t in range(32)
    ]
    with pytest.raises(Fault, match="race on shared memory"):
        launch(written + read, target=target, threads=32)
    with pytest.raises(Unknown):
        # of one warp among several the executor knows no barrier
        launch(both)


def test_shuffles_stay_in_their_warp():
    got = launch("shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1; " + STORE)
    assert got.tolist() == [t ^ 16 for t in range(THREADS)]
    got = launch(
        "shr.u32 %r8, %r1, 1; shfl.sync.idx.b32 %r9, %r1, %r8, 31, -1; " + STORE
    )
    assert got.tolist() == [t & ~31 | t // 2 % 32 for t in range(THREADS)]


def test_approximations_are_blurred_by_an_ulp_where_that_is_asked_for():
    x = np.linspace(0.5, 3, THREADS, dtype=np.float32)
    wide = x.astype(np.float64)
    for name, exact in (
        ("rsqrt.approx.ftz.f32", wide**-0.5),
        ("ex2.approx.f32", 2**wide),
    ):
        plain, moved = (
            computed(f"{name} %r9, %r20;", x, blurred=b) for b in (False, True)
        )
        assert np.array_equal(plain.view(np.float32), exact.astype(np.float32))
        assert set((moved - plain).tolist()) == {-1, 0, 1}
    same = [
        computed("div.rn.f32 %r9, %r20, %r21;", x, x[::-1].copy(), blurred=b)
        for b in (False, True)
    ]
    assert np.array_equal(*same)


def test_matrices_are_read_as_four_lanes_a_row():
    """Thread l of a warp gets columns 2 (l % 4) and the next of row l / 4, whatever
    threads gave the rows.
    """
    body = ("st.shared.b32 [%r2], %r1; bar.sync 0; and.b32 %r5, %r1, 7; shl.b32 %r6, %r5, 4;"
            " ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r6]; " + STORE)  # fmt: skip
    assert launch(body).tolist() == 2 * list(range(32))
