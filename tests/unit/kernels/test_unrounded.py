"""The norm of a residual sum before it is rounded: compiled kernels against the formula
in plain torch.
"""

import pytest
import torch
from tolerance import assert_as_accurate

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops.unrounded import norm_of_summands
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_kernels import doubled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16 = torch.bfloat16, torch.float16
SPECS = {
    "vLLM": NormSpec(False, 1e-6, rounding="before_weight"),
    "SGLang": NormSpec(False, 1e-6),
    "Gemma in vLLM": NormSpec(False, 1e-6, weight_offset=1.0),
    "no weight": NormSpec(False, 1e-6, has_weight=False),
}


def operands(size, dtype, spec):
    generator = torch.Generator().manual_seed(size)
    tensors = torch.randn(3, 64, size, generator=generator)
    left, right, dy = tensors.to(DEVICE, dtype)
    weight = None
    if spec.has_weight:
        weight = 0.3 * torch.randn(size, generator=generator)
        weight = weight + 1 - spec.weight_offset
        weight = weight.to(DEVICE, dtype)
    return left, right, weight, dy


def run(left, right, weight, dy, spec, backend):
    total = (left + right).requires_grad_()
    leaves = [total]
    if weight is not None:
        leaves.append(weight.requires_grad_())
    with use_backend(backend):
        y = norm_of_summands(total, left, right, weight, None, spec)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "size", [96, 1000, 4096, pytest.param(14_336, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", SPECS)
def test_forward_and_backward(name, size, dtype):
    spec = SPECS[name]
    left, right, weight, dy = operands(size, dtype, spec)
    with count_launches() as launches:
        got = run(left, right, weight, dy, spec, "triton")
    assert launches["norm_forward"] == 1
    expected = run(left, right, weight, dy, spec, "reference")
    assert (got[0] != expected[0]).float().mean() <= 1e-3
    zeros = torch.zeros_like(left)
    rounded = run(left + right, zeros, weight, dy, spec, "reference")
    differs = got[0] != rounded[0]
    assert differs.float().mean() > 0.05, "the sum was rounded first"
    exact = run(*doubled(left, right, weight, dy), spec, "reference")
    names = ("y", "dx", "dweight")
    for name, *tensors in zip(names, got, expected, exact, strict=False):
        assert_as_accurate(*tensors, name)


def test_rows_of_any_strides():
    spec = SPECS["vLLM"]
    left, right, weight, dy = operands(96, BF16, spec)
    apart = torch.empty(64, 200, dtype=BF16, device=DEVICE)[:, 3:99].copy_(right)
    whole = run(left, right, weight, dy, spec, "triton")
    strided = run(left, apart, weight, dy, spec, "triton")
    assert torch.equal(whole[0], strided[0])
    assert strided[0].stride() == (96, 1)


def test_a_gradient_of_the_gradient():
    """Of float16, against float64: the second derivative is there, at the sum that was
    not rounded.
    """
    spec = SPECS["SGLang"]
    left, right, weight, dy = operands(96, FP16, spec)

    def penalty(function, *tensors):
        left, right, weight, dy = tensors
        total = (left + right).requires_grad_()
        y = function(total, left, right, weight)
        (dx,) = torch.autograd.grad(y, total, dy, create_graph=True)
        loss = dx.float().square().sum()
        (gradient,) = torch.autograd.grad(loss, total)
        return gradient

    def fused(*operands):
        return norm_of_summands(*operands, None, spec)

    def plain(total, left, right, weight):
        return reference_norm(total, weight, None, spec)

    with use_backend("triton"):
        got = penalty(fused, left, right, weight, dy)
    exact = penalty(plain, *doubled(left, right, weight, dy))
    error = (got - exact).abs()
    assert error.max() <= 0.01 * exact.abs().max()
