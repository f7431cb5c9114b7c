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


PAIRS = list(itertools.product(range(3), repeat=2))


@pytest.mark.parametrize("x_layout, other_layout", PAIRS)
@pytest.mark.parametrize("spec", [RMS, FUNCTIONAL], ids=["rms", "functional"])
@pytest.mark.parametrize("has_residual", [True, False])
def test_values_and_strides_are_those_of_plain_torch(
    spec, x_layout, other_layout, has_residual
):
    x = [*layouts(rows(2, 3, 24))][x_layout]
    residual = (
        [*layouts(rows(2, 3, 24, seed=1))][other_layout] if has_residual else None
    )
    w, b = rows(24, seed=2) + 1.5, rows(24, seed=3) if spec.has_bias else None
    total = x if residual is None else residual + x
    y, rstd, mean, h = norm_forward(x, w, b, spec, True, None, residual)
    expected = reference_norm(total, w, b, spec)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert y.stride() == expected.stride()
    assert (
        residual is None
        and h is None
        or torch.equal(h, total)
        and h.stride() == total.stride()
    )
    total = total.detach().requires_grad_()
    dy = [*layouts(rows(2, 3, 24, seed=4))][other_layout]
    found = norm_backward(
        dy,
        total.detach(),
        w,
        b,
        rstd,
        mean,
        spec,
        (True, True, b is not None),
        None,
        dy,
    )
    (right,) = torch.autograd.grad(reference_norm(total, w, b, spec), total, dy)
    torch.testing.assert_close(found[0], right + dy, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x_layout, other_layout", PAIRS)
@pytest.mark.parametrize("gate", ["silu_before", "sigmoid_after"])
def test_gates_in_any_strides(gate, x_layout, other_layout):
    spec = NormSpec(False, 1e-2, gate=gate)
    x, g = (
        [*layouts(rows(2, 3, 24))][x_layout],
        [*layouts(rows(2, 3, 24, seed=1))][other_layout],
    )
    w, dy = rows(24, seed=2) + 1.5, [*layouts(rows(2, 3, 24, seed=4))][other_layout]
    y, rstd, mean, _ = norm_forward(x, w, None, spec, True, g)
    leaves = [t.detach().requires_grad_() for t in (x, w, g)]
    expected = reference_norm(leaves[0], leaves[1], None, spec, leaves[2])
    torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-5)
    dx, dw, db, dg = norm_backward(
        dy, x, w, None, rstd, mean, spec, (True, True, False, True), g
    )
    assert db is None
    for got, right in zip(
        (dx, dw, dg), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


NEEDS = [need for need in itertools.product((True, False), repeat=3) if any(need)]


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("columns", [24, 8_200, WIDE])
@pytest.mark.parametrize(
    "spec", [BIASED, replace(BIASED, centered=True)], ids=["rms", "layer norm"]
)
@pytest.mark.parametrize("from_output", [False, True])
def test_what_is_needed_is_computed_and_nothing_else(spec, columns, need, from_output):
    x, w, b, dy = (
        rows(3, columns),
        rows(columns, seed=1).abs() + 0.5,
        rows(columns, seed=2),
        rows(3, columns, seed=3),
    )
    y, rstd, mean, _ = norm_forward(x, w, b, spec, True)
    with count_launches() as launches:
        found = norm_backward(
            dy,
            y if from_output else x,
            w,
            b,
            rstd,
            mean,
            spec,
            need,
            None,
            None,
            from_output,
        )
    parameters = need[1] + need[2]
    apart = spec.centered and columns > 8_192 and need[0] and parameters > 0
    expected = {"norm_backward": 1 + apart, "reduce_partials": parameters}
    assert launches == {name: count for name, count in expected.items() if count}
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    expected = torch.autograd.grad(reference_norm(*leaves, spec), leaves, dy)
    for got, right, needed in zip(found, expected, need, strict=False):
        assert (got is not None) == needed
        if needed:
            torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rounding", ["before_weight", "once"])
@pytest.mark.parametrize("gate", ["silu_before", "silu_after", "sigmoid_after"])
@pytest.mark.parametrize("has_weight", [True, False])
def test_gated_norms_have_the_bits_of_eager(has_weight, gate, rounding):
    spec = NormSpec(
        False,
        1e-6,
        has_weight=has_weight,
        rounding=rounding if has_weight else "once",
        gate=gate,
    )
    x, other = rows(64, 96).to(HALF), rows(64, 96, seed=1).to(HALF)
    w = rows(96, seed=2).to(HALF) if has_weight else None
    y, *_ = norm_forward(x, w, None, spec, False, other)
    # its sums have another order
    assert (y == reference_norm(x, w, None, spec, other)).double().mean() >= 0.999


@pytest.mark.parametrize(
    "need", [need for need in itertools.product((True, False), repeat=3) if any(need)]
)
@pytest.mark.parametrize("gate", ["silu_before", "silu_after"])
def test_what_is_needed_of_a_gated_norm_is_computed_and_nothing_else(gate, need):
    spec = NormSpec(False, 1e-2, gate=gate)
    leaves = [
        t.requires_grad_()
        for t in (rows(3, 24), rows(24, seed=1) + 1.5, rows(3, 24, seed=2))
    ]
    dy = rows(3, 24, seed=3)
    expected = torch.autograd.grad(
        reference_norm(*leaves[:2], None, spec, leaves[2]), leaves, dy
    )
    x, w, g = (t.detach() for t in leaves)
    _, rstd, mean, _ = norm_forward(x, w, None, spec, True, g)
    dx, dw, _, dg = norm_backward(
        dy, x, w, None, rstd, mean, spec, (*need[:2], False, need[2]), g
    )
    for got, right, needed in zip((dx, dw, dg), expected, need, strict=True):
        assert (got is not None) == needed
        if needed:
            torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [24, 8_200, WIDE])
@pytest.mark.parametrize("spec", [NormSpec(False, 0.5, eps_outside=True), NormSpec(True, 0.5, eps_outside=True),
                                  NormSpec(False, 0.5, weight_offset=1.0),
                                  NormSpec(False, 1e-2, gate="silu_after"), NormSpec(False, 1e-2, gate="silu_before")],
                         ids=["outside", "centred", "offset", "after", "before"])  # fmt: skip
def test_formulas_in_short_wide_and_widest_rows(spec, columns):
    leaves = [
        t.requires_grad_()
        for t in (
            rows(2, columns),
            rows(columns, seed=1) + 1.5,
            rows(2, columns, seed=2),
        )
    ]
    x, w, gate = leaves if spec.gate else (*leaves[:2], None)
    dy = rows(2, columns, seed=3)
    expected = reference_norm(x, w, None, spec, gate)
    right = torch.autograd.grad(expected, leaves if spec.gate else leaves[:2], dy)
    x, w, gate = (t if t is None else t.detach() for t in (x, w, gate))
    y, rstd, mean, _ = norm_forward(x, w, None, spec, True, gate)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-4, atol=1e-4)
    found = norm_backward(
        dy, x, w, None, rstd, mean, spec, (True, True, False, gate is not None), gate
    )
    for got, wanted in zip([t for t in found if t is not None], right, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", [24, 1_032])
@pytest.mark.parametrize("centered", [True, False])
def test_a_weight_for_each_head(columns, centered):
    spec = NormSpec(centered, 1e-2, has_bias=True)
    leaves = [
        t.requires_grad_()
        for t in (
            rows(5, 3, columns),
            rows(3, columns, seed=1) + 1.5,
            rows(3, columns, seed=2),
        )
    ]
    dy = rows(5, 3, columns, seed=3)
    expected = reference_norm(*leaves, spec)
    x, w, b = (t.detach() for t in leaves)
    y, rstd, mean, _ = norm_forward(x, w, b, spec, True)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-5)
    found = norm_backward(dy, x, w, b, rstd, mean, spec, (True, True, True))
    for got, wanted in zip(
        found, torch.autograd.grad(expected, leaves, dy), strict=False
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows_of_heads", [(2, 3), (3, 2)])
def test_strides_of_a_product_with_a_weight_for_each_head(rows_of_heads):
    """Eager multiplies by the weight, which has a say in the strides of the product."""
    for x in layouts(rows(*rows_of_heads, 24)):
        w = rows(rows_of_heads[1], 24, seed=1) + 1.5
        expected = reference_norm(x, w, None, RMS)
        y, *_ = norm_forward(x, w, None, RMS, False)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        assert y.stride() == expected.stride()
