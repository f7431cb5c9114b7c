"""The norm of a residual sum before it is rounded: compiled kernels against the formula
in plain torch.
"""

import pytest
import torch
from tolerance import assert_as_accurate

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.patching.servers.summands import norm_of_summands
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_norm_forward import BF16, FP16, doubled, random

parametrize = pytest.mark.parametrize

SPECS = {
    "vLLM": NormSpec(False, 1e-6, rounding="before_weight"),
    "SGLang": NormSpec(False, 1e-6),
    "Gemma in vLLM": NormSpec(False, 1e-6, weight_offset=1.0),
    "no weight": NormSpec(False, 1e-6, has_weight=False),
}
SIZES = [
    96,
    1000,
    4096,
    pytest.param(14_336, marks=pytest.mark.full),
]


def operands(size, dtype, spec):
    left = random(64, size, dtype=dtype, seed=0)
    right = random(64, size, dtype=dtype, seed=1)
    dy = random(64, size, dtype=dtype, seed=2)
    weight = None
    if spec.has_weight:
        mean = 1.0 - spec.weight_offset
        weight = random(size, dtype=dtype, seed=3, scale=0.3, mean=mean)
    return left, right, weight, dy


def run(left, right, weight, dy, spec, backend):
    total = left + right
    leaves = [total.requires_grad_()]
    if weight is not None:
        leaves.append(weight.requires_grad_())
    with use_backend(backend):
        y = norm_of_summands(total, left, right, weight, None, spec)
        gradients = torch.autograd.grad(y, leaves, dy)
    return [y.detach(), *gradients]


@parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@parametrize("size", SIZES)
@parametrize("name", SPECS)
def test_forward_and_backward(name, size, dtype):
    spec = SPECS[name]
    tensors = operands(size, dtype, spec)
    with count_launches() as launches:
        fused = run(*tensors, spec, "triton")
    assert launches["norm_forward"] == 1
    eager = run(*tensors, spec, "reference")
    exact = run(*doubled(*tensors), spec, "reference")
    names = ("y", "dx", "dweight")
    for name, *results in zip(names, fused, eager, exact, strict=False):
        assert_as_accurate(*results, name)
    differs = fused[0] != eager[0]
    assert differs.float().mean() <= 1e-3


def test_the_sum_is_not_rounded_first():
    spec = SPECS["vLLM"]
    left, right, weight, dy = operands(96, BF16, spec)
    total = left + right
    zeros = torch.zeros_like(left)
    y, *_ = run(left, right, weight, dy, spec, "triton")
    of_rounded, *_ = run(total, zeros, weight, dy, spec, "triton")
    differs = y != of_rounded
    assert differs.float().mean() > 0.05


def test_rows_of_any_strides():
    spec = SPECS["vLLM"]
    left, right, weight, dy = operands(96, BF16, spec)
    wide = torch.empty(64, 200, dtype=BF16)
    strided = wide[:, 3:99]
    strided.copy_(right)
    expected, *_ = run(left, right, weight, dy, spec, "triton")
    y, *_ = run(left, strided, weight, dy, spec, "triton")
    assert torch.equal(y, expected)
    assert y.stride() == (96, 1)


def test_a_gradient_of_the_gradient():
    """Of float16, against float64: the second derivative is there, at the sum that was
    not rounded.
    """
    spec = SPECS["SGLang"]
    tensors = operands(96, FP16, spec)

    def fused(total, left, right, weight):
        return norm_of_summands(total, left, right, weight, None, spec)

    def plain(total, left, right, weight):
        return reference_norm(total, weight, None, spec)

    def penalty(function, left, right, weight, dy):
        total = left + right
        total.requires_grad_()
        y = function(total, left, right, weight)
        (dx,) = torch.autograd.grad(y, total, dy, create_graph=True)
        loss = dx.float().square().sum()
        (gradient,) = torch.autograd.grad(loss, total)
        return gradient

    with use_backend("triton"):
        gradient = penalty(fused, *tensors)
    exact = penalty(plain, *doubled(*tensors))
    error = (gradient - exact).abs()
    assert error.max() <= 0.01 * exact.abs().max()
