"""What the executor of PTX computes."""

import numpy as np
import pytest
import torch

from benchmarks.ptx.probe import THREADS, computed, launch

parametrize = pytest.mark.parametrize


def floats(*values):
    return np.array(values, np.float32)


def integers(*values):
    return np.array(values, np.int32)


def tensor_of(array, dtype):
    """The bits of an array as a tensor of that dtype."""
    return torch.from_numpy(array.copy()).view(dtype)


def assert_same(tensor, expected):
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


def test_a_fused_multiply_add_rounds_once():
    half = 2.0**-60
    a = 1 + 2.0**-12  # the square is halfway between two float32 numbers
    x = floats(a, a, a, 1e30)
    z = floats(0, half, -half, 1)
    got = computed("fma.rn.f32 %r9, %r20, %r20, %r21;", x, z)
    even = np.float32(1 + 2.0**-11)
    next_one = np.nextafter(even, np.float32(2))
    expected = [even, next_one, even, np.inf]
    assert got[:4].view(np.float32).tolist() == expected


EDGES = [
    0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.4e38, 3.4e38, np.inf, -np.inf, np.nan,
    1e-40, 65504.0, 65520.0, 6e-8, 0.1, -0.3,
]  # fmt: skip
HALVES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}


@parametrize("name", HALVES)
def test_halves_are_rounded_as_torch_rounds_them(name):
    dtype = HALVES[name]
    spread = torch.randn(THREADS - len(EDGES)) * 100
    values = torch.cat([torch.tensor(EDGES), spread])
    expected = values.to(dtype)
    floats = values.numpy()
    pairs = computed(f"cvt.rn.{name}x2.f32 %r9, %r20, %r21;", floats, floats)
    assert_same(tensor_of(pairs, dtype), expected.repeat_interleave(2))
    statements = f"""
        mov.b32 {{%rs1, %rs2}}, %r20;
        cvt.f32.{name} %r9, %rs1;
        """
    back = computed(statements, pairs)
    assert_same(tensor_of(back, torch.float32), expected.float())


@parametrize("name", HALVES)
@parametrize("operator", ["add", "sub", "mul", "fma"])
def test_arithmetic_of_halves_rounds_once(name, operator):
    dtype = HALVES[name]
    a, b, c = torch.randn(3, 2 * THREADS).to(dtype)
    wide_a, wide_b, wide_c = a.double(), b.double(), c.double()
    exact = {
        "add": wide_a + wide_b,
        "sub": wide_a - wide_b,
        "mul": wide_a * wide_b,
        "fma": wide_a * wide_b + wide_c,
    }
    operands = [a, b]
    registers = "%r20, %r21"
    if operator == "fma":
        operands.append(c)
        registers += ", %r22"
    pairs = [half.view(torch.int32).numpy() for half in operands]
    got = computed(f"{operator}.rn.{name}x2 %r9, {registers};", *pairs)
    expected = exact[operator].to(dtype)
    assert torch.equal(tensor_of(got, dtype), expected)


ONE = 0x3F80  # in bfloat16
NAN = 0x7FC0
MINUS_ZERO = 0x8000
HALVES_COMPARED = """
    mov.b32 {{%rs1, %rs2}}, %r20;
    mov.b32 {{%rs3, %rs4}}, %r21;
    setp.{}.bf16 %p2, %rs1, %rs3;
    selp.b32 %r9, 1, 0, %p2;
    """
NAN_SEEN = """
    setp.nan.f32 %p2, %r20, %r21;
    selp.b32 %r9, 1, 0, %p2;
    """
WIDE_INTEGERS = """
    mul.wide.s32 %rd9, %r20, %r21;
    shr.s64 %rd8, %rd9, 8;
    cvt.u32.u64 %r9, %rd8;
    """
WIDE_HALVES = """
    mov.b32 {%rs1, %rs2}, %r20;
    mul.wide.u16 %r9, %rs1, %rs2;
    """
INTEGERS = integers(-7, 7, -7, 5), integers(2, -2, -2, 7)
HALF_NUMBERS = integers(0, ONE, NAN, ONE), integers(MINUS_ZERO, ONE, NAN, 0)
SMALL = (floats(1e-40, -1e-40, 0.25, -0.25),)
BYTES = integers(0x3F80_1234), integers(0x4049_5678)
RESULTS = [
    ("rem.s32 %r9, %r20, %r21;", INTEGERS, [-1, 1, -1, 5]),
    ("mul.hi.s32 %r9, %r20, %r21;", INTEGERS, [-1, -1, 0, 0]),
    ("mul.lo.s32 %r9, %r20, %r21;", INTEGERS, [-14, -14, 14, 35]),
    ("div.u32 %r9, %r20, %r21;", INTEGERS, [2**31 - 4, 0, 0, 0]),
    ("min.s32 %r9, %r20, %r21;", INTEGERS, [-7, -2, -7, 5]),
    ("shr.s32 %r9, %r20, 3;", INTEGERS, [-1, 0, -1, 0]),
    ("shr.u32 %r9, %r20, 40;", INTEGERS, [0, 0, 0, 0]),
    ("and.b32 %r9, %r20, %r21;", INTEGERS, [0, 6, -8, 5]),
    ("bfe.u32 %r9, %r20, 1, 3;", INTEGERS, [4, 3, 4, 2]),
    ("bfe.s32 %r9, %r20, 1, 3;", INTEGERS, [-4, 3, -4, 2]),
    (
        WIDE_INTEGERS,
        (integers(2**31 - 1, -(2**31)), integers(3)),
        [3 * 2**23 - 1, -3 * 2**23],
    ),
    (WIDE_HALVES, (integers(0x4000_FFFF),), [0x4000 * 0xFFFF]),
    # -0 equals 0, and NaN differs from itself
    (HALVES_COMPARED.format("eq"), HALF_NUMBERS, [1, 1, 0, 0]),
    (HALVES_COMPARED.format("neu"), HALF_NUMBERS, [0, 0, 1, 1]),
    (HALVES_COMPARED.format("ltu"), HALF_NUMBERS, [0, 0, 1, 0]),
    (NAN_SEEN, (floats(1, np.nan, 1, np.nan), floats(1, 1, np.nan, np.inf)), [0, 1, 1, 1]),
    # the upper half of either, as a chip without bfloat16 packs two
    ("prmt.b32 %r9, %r20, %r21, 0x7632U;", BYTES, [0x4049_3F80]),
    # the fourth bit asks for a sign
    ("prmt.b32 %r9, %r20, %r21, 0x00C4;", BYTES, [0x3434_0078]),
    # numbers too small to be normal count as zero where asked
    ("abs.ftz.f32 %r9, %r20;", SMALL, [0.0, 0.0, 0.25, 0.25]),
    ("rcp.approx.ftz.f32 %r9, %r20;", SMALL, [np.inf, -np.inf, 4.0, -4.0]),
    ("fma.rn.ftz.f32 %r9, %r20, %r20, %r20;", SMALL, [0.0, 0.0, 0.3125, -0.1875]),
    ("div.rn.ftz.f32 %r9, %r20, 0f40000000;", SMALL, [0.0, 0.0, 0.125, -0.125]),
    ("sqrt.rn.ftz.f32 %r9, %r20;", SMALL, [0.0, 0.0, 0.5, np.nan]),
]  # fmt: skip


@parametrize(("statements", "operands", "expected"), RESULTS)
def test_the_results_of_the_first_threads(statements, operands, expected):
    got = computed(statements, *operands)[: len(expected)]
    if isinstance(expected[0], float):
        got = got.view(np.float32)
    np.testing.assert_array_equal(got, expected)


def test_shuffles_stay_in_their_warp():
    body = """
        shfl.sync.bfly.b32 %r9, %r1, 16, 31, -1;
        st.global.b32 [%rd5], %r9;
        """
    expected = [t ^ 16 for t in range(THREADS)]
    assert launch(body).tolist() == expected


def test_a_shuffle_names_the_lane_of_its_warp():
    body = """
        shr.u32 %r8, %r1, 1;
        shfl.sync.idx.b32 %r9, %r1, %r8, 31, -1;
        st.global.b32 [%rd5], %r9;
        """
    expected = [t // 32 * 32 + t // 2 % 32 for t in range(THREADS)]
    assert launch(body).tolist() == expected


def test_approximations_are_blurred_by_an_ulp_where_that_is_asked_for():
    x = np.linspace(0.5, 3, THREADS, dtype=np.float32)
    exact = np.exp2(x.astype(np.float64))
    statement = "ex2.approx.f32 %r9, %r20;"
    plain = computed(statement, x)
    moved = computed(statement, x, blurred=True)
    assert np.array_equal(plain.view(np.float32), exact.astype(np.float32))
    assert set((moved - plain).tolist()) == {-1, 0, 1}
    statement = "div.rn.f32 %r9, %r20, %r20;"  # which is rounded correctly
    plain = computed(statement, x)
    assert np.array_equal(plain, computed(statement, x, blurred=True))


def test_matrices_are_read_as_four_lanes_a_row():
    """Thread l of a warp gets columns 2 (l % 4) and the next of row l / 4, whatever
    threads gave the rows.
    """
    body = """
        st.shared.b32 [%r2], %r1;
        bar.sync 0;
        and.b32 %r5, %r1, 7;
        shl.b32 %r6, %r5, 4;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r9}, [%r6];
        st.global.b32 [%rd5], %r9;
        """
    of_a_warp = list(range(32))
    assert launch(body).tolist() == 2 * of_a_warp


def test_transposed_matrices_are_read_by_columns():
    """Thread l of a warp gets rows 2 (l % 4) and the next of column l / 4. Here each
    half of a word has the number of the thread that stored it.
    """
    body = """
        shl.b32 %r9, %r1, 16;
        or.b32 %r9, %r9, %r1;
        st.shared.b32 [%r2], %r9;
        bar.sync 0;
        and.b32 %r5, %r1, 7;
        shl.b32 %r6, %r5, 4;
        ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r9}, [%r6];
        st.global.b32 [%rd5], %r9;
        """
    expected = []
    for thread in range(32):
        word = thread // 4 // 2  # of the column, in a row of four
        row = thread % 4 * 2
        low = 4 * row + word
        high = 4 * (row + 1) + word
        expected.append(high << 16 | low)
    assert launch(body).tolist() == 2 * expected
