"""A norm with the scale and shift of an adaptive LayerNorm in one launch, compiled,
against torch's operators.
"""

from functools import partial

import pytest
import torch
from tolerance import assert_as_accurate

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import modulated as op
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPECS = {
    "LayerNorm": NormSpec(True, 1e-6, has_weight=False, functional=True),
    "LayerNorm with weight and bias": NormSpec(
        True, 1e-6, has_bias=True, functional=True
    ),
    "RMSNorm": NormSpec(False, 1e-6, rounding="before_weight"),
    "RMSNorm, one rounding": NormSpec(False, 1e-6),
}
# Of the scale and shift, beside x of (3, 5, size).
SHAPES = {
    "one per sequence": (3, 1),
    "one per token": (3, 5),
    "one": (),
    "one, expanded": (1, 1),
}


def modulated_norm(x, weight, bias, spec, scale, shift=None, **options):
    operands = x, weight, bias, scale, shift, None, None
    both = op.modulated_norm(spec, operands, **options)
    return None if both is None else both[1]


def operands(size, dtype, spec, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, scale, shift, dy = (
        torch.randn(*lead, size, generator=generator).to(DEVICE, dtype)
        for lead in ((3, 5), shape, shape, (3, 5))
    )
    weight, bias = (1 + 0.3 * torch.randn(2, size, generator=generator)).to(
        DEVICE, dtype
    )
    return (
        x,
        weight if spec.has_weight else None,
        bias if spec.has_bias else None,
        0.5 * scale,
        shift,
        dy,
    )


def eager(x, weight, bias, spec, scale, shift):
    y = reference_norm(x, weight, bias, spec) * (1 + scale)
    return y if shift is None else y + shift


def run(function, x, weight, bias, scale, shift, dy, spec):
    leaves = [
        t if t is None else t.detach().requires_grad_()
        for t in (x, weight, bias, scale, shift)
    ]
    y = function(*leaves[:3], spec, *leaves[3:])
    return [
        y.detach(),
        *torch.autograd.grad(y, [t for t in leaves if t is not None], dy),
    ]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", SPECS)
def test_forward_and_backward(name, shape, dtype):
    spec = SPECS[name]
    *tensors, dy = operands(96, dtype, spec, shape)
    with use_backend("triton"), count_launches() as launches:
        got = run(modulated_norm, *tensors, dy, spec)
    assert launches["norm_forward"] == launches["norm_backward"] == 1
    expected = run(eager, *tensors, dy, spec)
    if dtype != torch.float32:
        assert (got[0] != expected[0]).float().mean() <= 1e-3
    exact = run(eager, *(t if t is None else t.double() for t in (*tensors, dy)), spec)
    for at, (ours, theirs, right) in enumerate(zip(got, expected, exact, strict=True)):
        assert_as_accurate(ours, theirs, right, f"output {at}", [theirs])


def test_a_scale_without_a_shift():
    spec = SPECS["RMSNorm"]
    x, weight, bias, scale, _, dy = operands(96, torch.bfloat16, spec, (3, 1))
    with use_backend("triton"):
        got = run(modulated_norm, x, weight, bias, scale, None, dy, spec)
    assert torch.equal(got[0], eager(x, weight, bias, spec, scale, None))


def test_a_factor_that_is_multiplied_as_it_is():
    spec = SPECS["RMSNorm"]
    *tensors, dy = operands(96, torch.bfloat16, spec, (3, 1))

    def by_operators(x, weight, bias, spec, factor, shift):
        return reference_norm(x, weight, bias, spec) * factor + shift

    with use_backend("triton"):
        got = run(partial(modulated_norm, one_plus=False), *tensors, dy, spec)
    expected = run(by_operators, *tensors, dy, spec)
    exact = run(
        by_operators, *(t if t is None else t.double() for t in (*tensors, dy)), spec
    )
    assert torch.equal(got[0], expected[0])
    for at, (ours, theirs, right) in enumerate(zip(got, expected, exact, strict=True)):
        assert_as_accurate(ours, theirs, right, f"output {at}", [theirs])


def test_scale_and_shift_that_are_parts_of_one_tensor():
    spec = SPECS["LayerNorm"]
    x, *_ = operands(96, torch.bfloat16, spec, (3, 1))
    scale, shift, _ = operands(288, torch.bfloat16, spec, (3, 1))[3].chunk(3, dim=-1)
    with use_backend("triton"), torch.no_grad():
        assert torch.equal(
            modulated_norm(x, None, None, spec, scale, shift),
            eager(x, None, None, spec, scale, shift),
        )


@pytest.mark.parametrize(
    ("scale", "shift"),
    [
        (torch.randn(4, 1, 96), torch.randn(4, 1, 96)),  # another batch
        (torch.randn(2, 3, 5, 96), torch.randn(2, 3, 5, 96)),  # x is what broadcasts
        (torch.randn(3, 1, 96), torch.randn(3, 5, 96)),  # not alike
        (torch.randn(3, 1, 96).bfloat16(), torch.randn(3, 1, 96).bfloat16()),
        (torch.randn(3, 5, 1), torch.randn(3, 5, 1)),  # one for a whole row
    ],
)
def test_what_one_launch_does_not_compute_is_left_to_the_operators(scale, shift):
    spec = SPECS["LayerNorm"]
    x, *_ = operands(96, torch.float32, spec, ())
    with use_backend("triton"), torch.no_grad():
        found = modulated_norm(x, None, None, spec, scale.to(DEVICE), shift.to(DEVICE))
    assert found is None or torch.allclose(
        found, eager(x, None, None, spec, scale, shift), atol=1e-5
    )


def gated(x, residual, factor, weight, bias, spec, scale, shift):
    h = residual + (x if factor is None else factor * x)
    return h, eager(h, weight, bias, spec, scale, shift)


def gated_in_one_launch(x, residual, factor, weight, bias, spec, scale, shift):
    return op.modulated_norm(spec, (x, weight, bias, scale, shift, factor, residual))


def run_gated(function, operands, dh, dy, spec):
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    h, y = function(*leaves[:5], spec, *leaves[5:])
    wanted = [t for t in leaves if t is not None]
    return [h.detach(), y.detach(), *torch.autograd.grad((h, y), wanted, (dh, dy))]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("gate", ["with a gate", "without"])
@pytest.mark.parametrize("name", SPECS)
def test_a_sum_in_front(name, gate, shape, dtype):
    spec = SPECS[name]
    x, weight, bias, scale, shift, dy = operands(96, dtype, spec, shape)
    residual, _, _, factor, _, dh = operands(96, dtype, spec, shape, seed=1)
    tensors = (
        x,
        residual,
        factor if gate == "with a gate" else None,
        weight,
        bias,
        scale,
        shift,
    )
    with use_backend("triton"), count_launches() as launches:
        got = run_gated(gated_in_one_launch, tensors, dh, dy, spec)
    assert launches["norm_forward"] == launches["norm_backward"] == 1
    expected = run_gated(gated, tensors, dh, dy, spec)
    assert torch.equal(got[0], expected[0])
    if dtype != torch.float32:
        assert (got[1] != expected[1]).float().mean() <= 1e-3
    exact = run_gated(
        gated,
        [t if t is None else t.double() for t in tensors],
        dh.double(),
        dy.double(),
        spec,
    )
    for at, (ours, theirs, right) in enumerate(zip(got, expected, exact, strict=True)):
        assert_as_accurate(ours, theirs, right, f"output {at}", [theirs])


@pytest.mark.parametrize(
    "which", ["x in columns", "residual in columns", "another shape", "another dtype"]
)
def test_sums_that_are_left_to_the_operators(which):
    spec = SPECS["LayerNorm"]
    x, _, _, scale, shift, residual = operands(96, torch.bfloat16, spec, (3, 1))
    if "columns" in which:
        turned = (x if which[0] == "x" else residual).mT.contiguous().mT
        x, residual = (turned, residual) if which[0] == "x" else (x, turned)
    residual = {
        "another shape": residual[:, :1],
        "another dtype": residual.float(),
    }.get(which, residual)
    with use_backend("triton"), torch.no_grad():
        assert (
            gated_in_one_launch(x, residual, shift, None, None, spec, scale, shift)
            is None
        )


def test_a_gradient_of_the_gradient_of_a_gated_sum():
    spec = SPECS["LayerNorm"]
    x, _, _, scale, shift, dy = operands(96, torch.float32, spec, (3, 1))
    residual, _, _, factor, _, dh = operands(96, torch.float32, spec, (3, 1), seed=1)

    def penalty(function):
        leaves = [
            t.clone().requires_grad_() for t in (x, residual, factor, scale, shift)
        ]
        made = function(*leaves[:3], None, None, spec, *leaves[3:])
        (dx,) = torch.autograd.grad(made, leaves[0], (dh, dy), create_graph=True)
        return torch.autograd.grad(dx.square().sum() + made[1].sum(), leaves)

    with use_backend("triton"):
        got = penalty(gated_in_one_launch)
    for a, b in zip(got, penalty(gated), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", [0, 1])
def test_one_of_the_two_results_is_not_used(missing):
    spec = SPECS["RMSNorm"]
    x, weight, _, scale, shift, dy = operands(96, torch.float32, spec, (3, 1))
    residual, _, _, factor, *_ = operands(96, torch.float32, spec, (3, 1), seed=1)

    def gradients(function):
        leaves = [t.clone().requires_grad_() for t in (x, residual, factor)]
        made = function(*leaves, weight, None, spec, scale, shift)[1 - missing]
        return torch.autograd.grad(made, leaves, dy)

    with use_backend("triton"):
        got = gradients(gated_in_one_launch)
    for a, b in zip(got, gradients(gated), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
