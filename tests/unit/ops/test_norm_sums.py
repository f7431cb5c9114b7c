"""Residual add + norm in one launch: bit for bit what the two do apart, and its
gradients against float64.
"""

import pytest
import torch
from add_norm import fused_add_norm
from computed import compute_norm
from judged import judge

from benchmarks.counting import Operators
from hf_rmsnorm import use_backend
from hf_rmsnorm.kernels.compiled import INTERPRETED
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_norm_forward import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    LAYOUTS,
    SPECS,
    contiguous,
    parameters,
    real_strides,
    rows,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = []
for name, spec in SPECS.items():
    if spec.gate is None and spec.group_size is None:
        PLAIN.append(name)


def is_aligned(t):
    return t.data_ptr() % 16 == 0


def check(spec, x, residual, weight, bias, dh, dy):
    """Outputs bit for bit against the add and the unfused kernel; everything against
    float64.
    """

    def fused(*operands):
        return fused_add_norm(*operands, spec)

    def plain(x, residual, weight, bias):
        h = residual + x
        return h, reference_norm(h, weight, bias, spec)

    made, eager = judge(fused, plain, (x, residual, weight, bias), (dh, dy))
    for ours, theirs in zip(made[:2], eager, strict=False):
        assert real_strides(ours) == real_strides(theirs)
    h, y, dx, dresidual, *_ = made
    assert torch.equal(h, residual + x)
    # A GPU sums unaligned rows in other tiles, where the sum of them, a new tensor,
    # would be aligned.
    if INTERPRETED or (is_aligned(x) and is_aligned(residual)):
        with use_backend("triton"):
            assert torch.equal(y, compute_norm(h, weight, bias, spec))
    narrow = x.dtype
    if narrow == FP32:
        narrow = residual.dtype
    assert torch.equal(dx.to(narrow), dresidual.to(narrow)), "they share one gradient"


def summands(shape, dtype):
    """x and residual."""
    x = rows(*shape, dtype=dtype, seed=0)
    residual = rows(*shape, dtype=dtype, seed=3)
    return x, residual


def check_sum(name, x, residual, weight_dtype, sum_is_used=True):
    """`check` of these summands."""
    spec = SPECS[name]
    hidden_size = x.shape[-1]
    weight, bias = parameters(spec, hidden_size, weight_dtype)
    dtype = torch.promote_types(x.dtype, residual.dtype)
    dh = None
    if sum_is_used:
        dh = rows(*x.shape, dtype=dtype, seed=5)
    dy = rows(*x.shape, dtype=dtype, seed=7)
    check(spec, x, residual, weight, bias, dh, dy)


@pytest.mark.parametrize("sum_is_used", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_every_formula_in_every_dtype(name, dtype, sum_is_used):
    x, residual = summands((3, 5, 96), dtype)
    check_sum(name, x, residual, dtype, sum_is_used)


WIDTHS = [1, 7, 128, 1000, 1024, 2560, 9216]
WIDE = [4096, 8192, 12288, 14336, 16384]
for width in WIDE:
    case = pytest.param(width, marks=pytest.mark.full)
    WIDTHS.append(case)


@pytest.mark.parametrize("hidden_size", WIDTHS)
@pytest.mark.parametrize("name", ["llama", "layer_norm", "layer_norm_no_bias"])
def test_every_width(name, hidden_size):
    x, residual = summands((3, hidden_size), BF16)
    check_sum(name, x, residual, BF16)


MIXED = [
    # autocast: a linear's output, the residual stream, the weight
    (BF16, FP32, FP32),
    (FP16, FP32, FP32),
    (FP32, BF16, FP32),
    (BF16, FP32, BF16),
    (FP32, FP16, FP16),
    (BF16, BF16, FP32),
]


@pytest.mark.parametrize(("of_x", "of_residual", "of_weight"), MIXED)
@pytest.mark.parametrize("name", PLAIN)
def test_x_residual_and_weight_of_other_dtypes(name, of_x, of_residual, of_weight):
    spec = SPECS[name]
    if spec.functional and of_weight != FP32:
        pytest.skip("torch's own norms take one dtype")
    x, residual = summands((3, 96), FP32)
    x = x.to(of_x)
    residual = residual.to(of_residual)
    check_sum(name, x, residual, of_weight)


EVERY_LAYOUT = [contiguous, *LAYOUTS]


@pytest.mark.parametrize("x_layout", EVERY_LAYOUT)
@pytest.mark.parametrize("residual_layout", EVERY_LAYOUT)
@pytest.mark.parametrize("name", ["llama", "layer_norm"])
def test_strided_operands(name, x_layout, residual_layout):
    """h and y come in the order that PyTorch's addition gives these operands."""
    shape = (2, 3, 4, 64)
    x = x_layout(shape, BF16, 0)
    residual = residual_layout(shape, BF16, 3)
    check_sum(name, x, residual, BF16)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_sums_out_of_range_and_half_way_round_as_the_addition_does(dtype):
    """Ties to even, overflow to infinity, NaN, signed zeros and subnormal sums."""
    limits = torch.finfo(dtype)
    tiny = limits.tiny
    most = limits.max
    one = 1 + limits.eps
    values = [0.0, tiny, tiny / 2, 1.0, one, 2.0**-9, 2.0**-12, 3.0, 257.0, most]
    values += [-0.0, -one, -most, torch.inf, -torch.inf, torch.nan]
    values = torch.tensor(values, dtype=torch.float64)
    values = values.to(DEVICE, dtype)
    x = values.repeat(16, 1)
    residual = x.T.contiguous()
    spec = SPECS["no_weight"]
    with torch.no_grad(), use_backend("triton"):
        h, _ = fused_add_norm(x, residual, None, None, spec)
    total = residual + x
    torch.testing.assert_close(h, total, rtol=0, atol=0, equal_nan=True)
    numbers = ~h.isnan()
    h = h[numbers]
    total = total[numbers]
    assert torch.equal(h.signbit(), total.signbit())


def test_no_zeros_are_made_for_an_output_that_is_not_used():
    """A graph whose h goes nowhere costs neither a tensor of zeros nor the addition of
    it.
    """
    x, residual = summands((4, 64), BF16)
    x.requires_grad_()
    spec = SPECS["no_weight"]
    with use_backend("triton"):
        _, y = fused_add_norm(x, residual, None, None, spec)
        dy = torch.ones_like(y)
        with Operators() as operators:
            torch.autograd.grad(y, x, dy)
    assert not operators.computing


def test_leaves_that_share_a_gradient_do_not_share_its_memory():
    x, residual = summands((4, 64), FP32)
    x.requires_grad_()
    residual.requires_grad_()
    spec = SPECS["no_weight"]
    with use_backend("triton"):
        h, y = fused_add_norm(x, residual, None, None, spec)
        total = y.square() + h
        total.sum().backward()
    assert torch.equal(x.grad, residual.grad)
    assert x.grad.data_ptr() != residual.grad.data_ptr()
