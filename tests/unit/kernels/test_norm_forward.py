"""The Triton kernels against float64, for every formula, dtype, width and layout.

The tolerance is the policy of tests/helpers/tolerance.py.
"""

from functools import partial

import pytest
import torch
from computed import compute_norm
from hypothesis import given, settings
from hypothesis import strategies as st
from judged import in_another_order, judge

from benchmarks.counting import Operators
from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.reference import reference_norm

parametrize = pytest.mark.parametrize

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
DTYPES = (FP32, BF16, FP16)
SPECS = {
    "llama": NormSpec(False, 1e-6, rounding="before_weight"),
    "fp32_weight": NormSpec(False, 1e-5),
    "gemma": NormSpec(False, 1e-6, weight_offset=1.0),
    "t5": NormSpec(False, 1e-6, rounding="weight_dtype"),
    "no_weight": NormSpec(False, 1e-6, has_weight=False),
    "rms_bias": NormSpec(False, 1e-6, has_bias=True, rounding="before_weight"),
    "layer_norm": NormSpec(True, 1e-5, has_bias=True, functional=True),
    "layer_norm_no_bias": NormSpec(True, 1e-5),
    "layer_norm_no_affine": NormSpec(True, 1e-5, has_weight=False),
    "layer_norm_then_affine": NormSpec(
        True, 1e-5, has_bias=True, rounding="before_weight", functional=True
    ),
    "rounded_rstd_weight": NormSpec(False, 1e-6, rounding="rstd"),
    "textbook": NormSpec(False, 1e-2, has_bias=True, eps_outside=True),
    "textbook_layer_norm": NormSpec(True, 1e-2, eps_outside=True),
    "rounded_offset": NormSpec(
        False, 1e-6, weight_offset=1.0, rounding="before_weight"
    ),
    "silu_before": NormSpec(False, 1e-6, rounding="before_weight", gate="silu_before"),
    "silu_after": NormSpec(False, 1e-6, rounding="before_weight", gate="silu_after"),
    "sigmoid_after": NormSpec(False, 1e-6, gate="sigmoid_after"),
    "gated_layer_norm": NormSpec(True, 1e-5, has_bias=True, gate="silu_after"),
    "grouped": NormSpec(False, 1e-6, weight_offset=1.0, group_size=24),
    "grouped_silu_before": NormSpec(
        False, 1e-6, rounding="before_weight", gate="silu_before", group_size=24
    ),
}


def random(*shape, dtype, seed=0, scale=1.0, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values = values * scale + mean
    return values.to(dtype)


def rows(*shape, dtype, seed=0, mean=0.25):
    return random(*shape, dtype=dtype, seed=seed + 1, scale=1.7, mean=mean)


def parameters(spec, hidden_size, dtype, seed=0):
    """Weight and bias of a formula, None where it has none."""
    weight = None
    bias = None
    if spec.has_weight:
        mean = 1.0 - spec.weight_offset
        weight = random(hidden_size, dtype=dtype, seed=seed, scale=0.3, mean=mean)
        weight.requires_grad_()
    if spec.has_bias:
        bias = random(hidden_size, dtype=dtype, seed=seed + 100)
        bias.requires_grad_()
    return weight, bias


def assert_equal(tensors, expected):
    """Bit for bit, each of two lists of tensors."""
    for a, b in zip(tensors, expected, strict=True):
        assert torch.equal(a, b)


def real_strides(t):
    """The strides, but for those of dimensions of one element, which may be anything."""
    strides = zip(t.stride(), t.shape, strict=True)
    return [stride for stride, size in strides if size > 1]


def check(spec, x, weight, bias, dy, gate=None):
    """Forward and backward of the kernels against float64, judged by plain-torch eager
    on the same input.
    """

    def fused(x, weight, bias, gate):
        return (compute_norm(x, weight, bias, spec, gate=gate),)

    def plain(x, weight, bias, gate):
        return (reference_norm(x, weight, bias, spec, gate=gate),)

    if gate is None and spec.gate is not None:
        gate = rows(*x.shape, dtype=x.dtype, seed=11)
    reorder = in_another_order
    if weight is not None:  # of a weight for each head whole rows of heads
        reorder = partial(in_another_order, last=-1 - weight.dim())
    made, eager = judge(fused, plain, (x, weight, bias, gate), (dy,), reorder)
    assert real_strides(made[0]) == real_strides(eager[0])


def check_rows(name, shape, x_dtype, weight_dtype=None):
    """`check` of rows that lie one behind the other."""
    spec = SPECS[name]
    weight, bias = parameters(spec, shape[-1], weight_dtype or x_dtype)
    x = rows(*shape, dtype=x_dtype, seed=0)
    dy = rows(*shape, dtype=x_dtype, seed=7)
    check(spec, x, weight, bias, dy)


@parametrize("dtype", DTYPES)
@parametrize("name", SPECS)
def test_every_formula_in_every_dtype(name, dtype):
    check_rows(name, (3, 5, 96), dtype)


MIXED = [
    (BF16, FP32),
    (FP32, BF16),
    (FP16, FP32),
    (FP16, BF16),
]


@parametrize("name", ["llama", "fp32_weight", "t5", "layer_norm_no_bias"])
@parametrize(("x_dtype", "weight_dtype"), MIXED)
def test_mixed_dtypes(name, x_dtype, weight_dtype):
    check_rows(name, (4, 64), x_dtype, weight_dtype)


WIDTHS = [
    1,
    7,
    64,
    128,
    896,
    1000,
    1024,
    2048,
    4096,
    pytest.param(5120, marks=pytest.mark.full),
    8192,
    14336,
    16384,
]


@parametrize("hidden_size", WIDTHS)
@parametrize("name", ["llama", "layer_norm", "silu_before"])
def test_every_tile_width(name, hidden_size):
    # what a row of one leaves of dx is noise, here or eager's
    count = 64
    if hidden_size > 1:
        count = 3
    check_rows(name, (count, hidden_size), BF16)


@pytest.mark.full
@parametrize("hidden_size", [1152, 2560, 5120, 9216])
@parametrize("name", ["llama", "textbook", "layer_norm"])
def test_rows_much_shorter_than_their_tile(name, hidden_size):
    """What lies behind them is not computed; there are more rows than programs."""
    check_rows(name, (40, hidden_size), BF16)


def contiguous(shape, dtype, seed):
    return rows(*shape, dtype=dtype, seed=seed)


def packed(shape, dtype, seed):
    """A view of the first heads of a packed projection: gaps between the rows' groups."""
    *outer, heads, hidden_size = shape
    whole = rows(*outer, heads + 4, hidden_size, dtype=dtype, seed=seed)
    return whole[..., :heads, :]


def transposed(shape, dtype, seed):
    first, second, third, columns = shape
    whole = rows(first, third, second, columns, dtype=dtype, seed=seed)
    return whole.transpose(1, 2)


def last_dimension_strided(shape, dtype, seed):
    *outer, columns = shape
    whole = rows(*outer, 2 * columns, dtype=dtype, seed=seed)
    return whole[..., ::2]


def unaligned(shape, dtype, seed):
    *outer, columns = shape
    whole = rows(*outer, columns + 1, dtype=dtype, seed=seed)
    return whole[..., 1:]


def expanded(shape, dtype, seed):
    _, *inner = shape
    one = rows(1, *inner, dtype=dtype, seed=seed)
    return one.expand(shape)


LAYOUTS = [
    packed,
    transposed,
    last_dimension_strided,
    unaligned,
    expanded,
]


@parametrize("x_layout", LAYOUTS)
@parametrize("dy_layout", [packed, transposed])
@parametrize("name", ["llama", "layer_norm"])
def test_strided_rows_and_gradients(name, x_layout, dy_layout):
    shape = (2, 3, 4, 64)
    spec = SPECS[name]
    weight, bias = parameters(spec, 64, BF16)
    x = x_layout(shape, BF16, 0)
    dy = dy_layout(shape, BF16, 7)
    check(spec, x, weight, bias, dy)


@parametrize("name", ["llama", "layer_norm_then_affine", "silu_after"])
@parametrize("layout", [packed, transposed])
def test_every_head_has_a_weight_of_its_own(name, layout):
    spec = SPECS[name]
    shape = (2, 5, 3, 24)
    weight, bias = parameters(spec, 3 * 24, BF16)
    weight = weight.detach().view(3, 24)
    if bias is not None:
        bias = bias.detach().view(3, 24)
    x = layout(shape, BF16, 0)
    dy = rows(*shape, dtype=BF16, seed=7)
    check(spec, x, weight, bias, dy)


@parametrize("name", ["silu_before", "silu_after", "grouped_silu_before"])
def test_the_gate_is_read_where_it_lies(name):
    """x and gate are slices of one projection, and the gate may lie in another order
    than x.
    """
    spec = SPECS[name]
    weight, bias = parameters(spec, 96, BF16)
    dy = rows(2, 5, 96, dtype=BF16, seed=7)
    projected = rows(2, 5, 96 + 8 + 96, dtype=BF16)
    x = projected[..., :96]
    gate = projected[..., 104:]
    turned = rows(5, 2, 96, dtype=BF16).transpose(0, 1)
    check(spec, x, weight, bias, dy, gate)
    check(spec, x, weight, bias, dy, turned)
    check(spec, turned, weight, bias, dy, gate)


@parametrize("layout", [packed, transposed, unaligned])
def test_addressable_views_are_read_in_place(layout):
    """No operator but the allocation of the output: a copy of x would show."""
    spec = SPECS["llama"]
    x = layout((2, 3, 4, 64), BF16, 0)
    weight, _ = parameters(spec, 64, BF16)
    with torch.no_grad(), use_backend("triton"), Operators() as operators:
        compute_norm(x, weight, None, spec)
    assert operators.counts == {"empty_like": 1}


@pytest.mark.full  # 4.3 GB of address space, all of which is touched
def test_offsets_beyond_32_bits():
    spec = SPECS["llama"]
    hidden_size = 64
    stride = 2**31 + 64
    storage = torch.zeros(stride + hidden_size, dtype=BF16)
    x = storage.as_strided((2, hidden_size), (stride, 1))
    x.copy_(rows(2, hidden_size, dtype=BF16))
    weight, bias = parameters(spec, hidden_size, BF16)
    dy = rows(2, hidden_size, dtype=BF16, seed=7)
    check(spec, x, weight, bias, dy)


def test_no_rows_need_no_kernel():
    spec = SPECS["layer_norm"]
    weight, bias = parameters(spec, 64, FP32)
    x = torch.empty((2, 0, 64), requires_grad=True)
    with count_launches() as launches:
        y = compute_norm(x, weight, bias, spec)
        dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == x.shape
    assert dx.shape == x.shape
    assert not dweight.any()
    assert not launches


def test_weight_gradient_is_deterministic_and_skipped_when_frozen():
    spec = SPECS["llama"]
    weight, _ = parameters(spec, 128, BF16)
    x = rows(50, 128, dtype=BF16).requires_grad_()
    dy = rows(50, 128, dtype=BF16, seed=7)

    def gradients(weight, *wanted):
        y = compute_norm(x, weight, None, spec)
        return torch.autograd.grad(y, wanted, dy)

    with use_backend("triton"):
        first = gradients(weight, x, weight)
        again = gradients(weight, x, weight)
        assert_equal(first, again)
        with count_launches() as launches:
            (dx,) = gradients(weight.detach(), x)
    assert torch.equal(dx, first[0])
    # a frozen weight has no gradient to reduce
    assert launches == {"norm_forward": 1, "norm_backward": 1}


def test_many_rows_sum_in_float32():
    """A bfloat16 running sum over 4,000 rows would lose most of them."""
    x = torch.ones(4000, 8, dtype=BF16)
    weight = torch.ones(8, dtype=BF16, requires_grad=True)
    with use_backend("triton"):
        y = compute_norm(x, weight, None, SPECS["llama"])
        (dw,) = torch.autograd.grad(y, weight, torch.ones_like(x))
    assert torch.equal(dw, torch.full_like(dw, 4000.0))


@parametrize("hidden_size", [96, 1000, 16384])
def test_constant_rows_of_layer_norm_are_exactly_zero(hidden_size):
    spec = SPECS["layer_norm_no_affine"]
    x = torch.full((2, hidden_size), 1000.3)
    with use_backend("triton"):
        y = compute_norm(x, None, None, spec)
    assert not y.any()


@parametrize("hidden_size", [1000, 14336])
def test_layer_norm_of_rows_far_from_zero(hidden_size):
    """A mean 10,000 times the deviation: its own rounding must not reach the result."""
    x = 100 + 0.01 * rows(3, hidden_size, dtype=FP32, mean=0)
    dy = rows(3, hidden_size, dtype=FP32, seed=7)
    check(SPECS["layer_norm_no_affine"], x, None, None, dy)


HALVES = st.sampled_from([BF16, FP16])


# In half precision, and from 8 columns: otherwise both errors are a few roundings, and
# over a handful of elements their ratio is luck.
@settings(max_examples=settings().max_examples // 2)
@given(
    name=st.sampled_from(list(SPECS)),
    hidden_size=st.one_of(st.integers(8, 300), st.sampled_from([512, 1024, 3000])),
    outer=st.integers(1, 3),
    inner=st.integers(1, 4),
    layout=st.sampled_from([contiguous, *LAYOUTS]),
    x_dtype=HALVES,
    weight_dtype=HALVES,
    seed=st.integers(0, 2**16),
)
def test_any_shape_stride_dtype_and_formula(
    name, hidden_size, outer, inner, layout, x_dtype, weight_dtype, seed
):
    spec = SPECS[name]
    if spec.functional:
        weight_dtype = x_dtype  # as F.layer_norm demands
    if spec.group_size is not None:
        groups = -(-hidden_size // spec.group_size)
        hidden_size = groups * spec.group_size
    weight, bias = parameters(spec, hidden_size, weight_dtype, seed)
    shape = (2, outer, inner, hidden_size)
    x = layout(shape, x_dtype, seed)
    dy = rows(*shape, dtype=x_dtype, seed=seed + 7)
    check(spec, x, weight, bias, dy)
