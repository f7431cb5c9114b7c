"""What a launch writes: values and strides of plain torch, by the kernels that are
needed and no others.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from hf_rmsnorm import count_launches
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.reference import reference_norm

pytestmark = pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
if device_refusal("cpu") is None:
    from launched import norm_backward, norm_forward

WIDE = 16_376
RMS = NormSpec(False, 1e-2, rounding="before_weight")
BIASED = NormSpec(False, 1e-2, has_bias=True)
FUNCTIONAL = NormSpec(True, 1e-2, has_bias=True, functional=True)
HALF = torch.bfloat16


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layouts(t):
    """t in its own strides, with rows in another order, and with gaps between the
    elements.
    """
    yield t
    yield t.transpose(0, 1).contiguous().transpose(0, 1)
    yield torch.stack([t, t], -1)[..., 0]


NEEDS = [need for need in itertools.product((True, False), repeat=3) if any(need)]


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("columns", [24, 8_200, WIDE])
@pytest.mark.parametrize(
    "spec", [BIASED, replace(BIASED, centered=True)], ids=["rms", "layer norm"]
)
@pytest.mark.parametrize("from_output", [False, True])
def test_what_is_needed_is_computed_and_nothing_else(spec, columns, need, from_output):
    x = rows(3, columns)
    dy = rows(3, columns, seed=3)
    w = rows(columns, seed=1).abs() + 0.5
    b = rows(columns, seed=2)
    y, rstd, mean, _ = norm_forward(x, w, b, spec, True)
    read = dy, y if from_output else x, w, b, rstd, mean
    with count_launches() as launches:
        gradients = norm_backward(*read, spec, need, None, None, from_output)
    expected = {"norm_backward": 1}
    if any(need[1:]):
        expected["reduce_partials"] = 1
    assert launches == expected
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    expected = torch.autograd.grad(reference_norm(*leaves, spec), leaves, dy)
    for got, right, needed in zip(gradients, expected, need, strict=False):
        assert (got is not None) == needed
        if needed:
            torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rounding", ["before_weight", "once"])
@pytest.mark.parametrize("gate", ["silu_before", "silu_after", "sigmoid_after"])
@pytest.mark.parametrize("has_weight", [True, False])
def test_gated_norms_have_the_bits_of_eager(has_weight, gate, rounding):
    if not has_weight:
        rounding = "once"
    spec = NormSpec(False, 1e-6, has_weight, rounding=rounding, gate=gate)
    x = rows(64, 96).to(HALF)
    other = rows(64, 96, seed=1).to(HALF)
    w = None
    if has_weight:
        w = rows(96, seed=2).to(HALF)
    y, *_ = norm_forward(x, w, None, spec, False, other)
    # its sums have another order
    assert (y == reference_norm(x, w, None, spec, other)).double().mean() >= 0.999


@pytest.mark.parametrize("rows_of_heads", [(2, 3), (3, 2)])
def test_strides_of_a_product_with_a_weight_for_each_head(rows_of_heads):
    """Eager multiplies by the weight, which has a say in the strides of the product."""
    for x in layouts(rows(*rows_of_heads, 24)):
        w = rows(rows_of_heads[1], 24, seed=1) + 1.5
        expected = reference_norm(x, w, None, RMS)
        y, *_ = norm_forward(x, w, None, RMS, False)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        assert y.stride() == expected.stride()
