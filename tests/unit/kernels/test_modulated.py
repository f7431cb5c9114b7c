"""A norm with the scale and shift of an adaptive LayerNorm, and the gated sum before it,
in one launch, compiled, against torch's operators.
"""

import pytest
import torch
from tolerance import assert_as_accurate

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops.modulated import modulated_norm
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_kernels import doubled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {"bf16": BF16, "fp16": torch.float16, "fp32": FP32}
SPECS = {
    "LayerNorm": NormSpec(True, 1e-6, has_weight=False, functional=True),
    "LayerNorm with weight and bias": NormSpec(
        True, 1e-6, has_bias=True, functional=True
    ),
    "RMSNorm": NormSpec(False, 1e-6, rounding="before_weight"),
    "RMSNorm, one rounding": NormSpec(False, 1e-6),
}
# Of the scale and shift, beside x of (3, 5, 96).
SHAPES = {
    "one per sequence": (3, 1),
    "one per token": (3, 5),
    "one": (),
    "one, expanded": (1, 1),
}
BEFORE = ["no sum", "a sum", "a gated sum"]


def random(*shape, dtype, seed, mean=0.0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, 96, generator=generator)
    values = mean + scale * values
    return values.to(DEVICE, dtype)


def operands(spec, dtype, shape=(3, 1), before="no sum"):
    """(x, weight, bias, scale, shift, factor, residual)."""
    weight = random(dtype=dtype, seed=1, mean=1.0, scale=0.3)
    bias = random(dtype=dtype, seed=2, mean=1.0, scale=0.3)
    factor = random(*shape, dtype=dtype, seed=5)
    residual = random(3, 5, dtype=dtype, seed=6)
    return (
        random(3, 5, dtype=dtype, seed=0),
        weight if spec.has_weight else None,
        bias if spec.has_bias else None,
        random(*shape, dtype=dtype, seed=3, scale=0.5),
        random(*shape, dtype=dtype, seed=4),
        factor if before == "a gated sum" else None,
        None if before == "no sum" else residual,
    )


def by_operators(spec, operands, one_plus=True):
    """What the model computes."""
    x, weight, bias, scale, shift, factor, residual = operands
    h = x
    if factor is not None:
        h = factor * x
    if residual is not None:
        h = residual + h
    y = reference_norm(h, weight, bias, spec)
    if one_plus:
        scale = 1 + scale
    y = y * scale
    if shift is not None:
        y = y + shift
    return None if residual is None else h, y


def run(function, spec, operands, dys, **options):
    """The results that there are, and the gradients of all operands."""
    leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
    made = [t for t in function(spec, leaves, **options) if t is not None]
    wanted = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(made, wanted, dys[: len(made)])
    return [*(t.detach() for t in made), *gradients]


def in_another_order(tensors, seed, within_sequences):
    """The same with the rows of (3, 5) tokens shuffled, each sequence by itself if
    `within_sequences`.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(5 if within_sequences else 15, generator=generator)
    order = order.to(DEVICE)
    moved = []
    for t in tensors:
        if t is not None and t.shape[:2] == (3, 5):
            sequences = t if within_sequences else t.reshape(1, 15, -1)
            t = sequences[:, order].reshape(t.shape)
        moved.append(t)
    return moved


def check(spec, operands, **options):
    """All results and gradients; returns those of the kernels, and eager's."""
    dys = []
    for seed in (7, 8):
        dys.append(random(3, 5, dtype=operands[0].dtype, seed=seed))
    with use_backend("triton"), count_launches() as launches:
        ours = run(modulated_norm, spec, operands, dys, **options)
    assert launches["norm_forward"] == launches["norm_backward"] == 1
    theirs = run(by_operators, spec, operands, dys, **options)
    exact = run(by_operators, spec, doubled(*operands), doubled(*dys), **options)
    within_sequences = operands[3].shape[:2] == (3, 1)
    orders = []
    for seed in range(4):
        moved = in_another_order(operands, seed, within_sequences)
        moved_dys = in_another_order(dys, seed, within_sequences)
        orders.append(run(by_operators, spec, moved, moved_dys, **options))
    for at, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        others = []
        if a.shape != operands[0].shape:  # a sum over rows
            others = [made[at] for made in orders]
        assert_as_accurate(a, b, c, f"output {at}", others)
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", SPECS)
def test_forward_and_backward(name, before, shape, dtype):
    spec = SPECS[name]
    ours, theirs = check(spec, operands(spec, dtype, shape, before))
    y = 0
    if before != "no sum":
        assert torch.equal(ours[0], theirs[0])
        y = 1
    if dtype != FP32:
        assert (ours[y] != theirs[y]).float().mean() <= 1e-3


def test_a_scale_without_a_shift():
    spec = SPECS["RMSNorm"]
    x, weight, bias, scale, _, factor, residual = operands(spec, BF16)
    ours, theirs = check(spec, (x, weight, bias, scale, None, factor, residual))
    assert torch.equal(ours[0], theirs[0])


def test_a_factor_that_is_multiplied_as_it_is():
    spec = SPECS["RMSNorm"]
    ours, theirs = check(spec, operands(spec, BF16), one_plus=False)
    assert torch.equal(ours[0], theirs[0])


def test_scale_and_shift_that_are_parts_of_one_tensor():
    spec = SPECS["LayerNorm"]
    x, *_ = operands(spec, BF16)
    modulation = torch.cat(operands(spec, BF16)[3:5], dim=-1)
    scale, shift = modulation.chunk(2, dim=-1)
    parts = x, None, None, scale, shift, None, None
    with use_backend("triton"), torch.no_grad():
        _, y = modulated_norm(spec, parts)
    assert torch.equal(y, by_operators(spec, parts)[1])


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
    x, *_ = operands(spec, FP32)
    parts = x, None, None, scale.to(DEVICE), shift.to(DEVICE), None, None
    with use_backend("triton"), torch.no_grad():
        made = modulated_norm(spec, parts)
    if made is not None:
        expected = by_operators(spec, parts)
        assert torch.allclose(made[1], expected[1], atol=1e-5)


@pytest.mark.parametrize(
    "which", ["x in columns", "residual in columns", "another shape", "another dtype"]
)
def test_sums_that_are_left_to_the_operators(which):
    spec = SPECS["LayerNorm"]
    x, *others, residual = operands(spec, BF16, before="a gated sum")
    if which == "x in columns":
        x = x.mT.contiguous().mT
    elif which == "residual in columns":
        residual = residual.mT.contiguous().mT
    elif which == "another shape":
        residual = residual[:, :1]
    else:
        residual = residual.float()
    with use_backend("triton"), torch.no_grad():
        assert modulated_norm(spec, (x, *others, residual)) is None


def test_a_gradient_of_the_gradient_of_a_gated_sum():
    spec = SPECS["LayerNorm"]
    tensors = operands(spec, FP32, before="a gated sum")
    dys = random(3, 5, dtype=FP32, seed=7), random(3, 5, dtype=FP32, seed=8)

    def penalty(function):
        leaves = [t if t is None else t.clone().requires_grad_() for t in tensors]
        made = function(spec, leaves)
        (dx,) = torch.autograd.grad(made, leaves[0], dys, create_graph=True)
        wanted = [t for t in leaves if t is not None]
        return torch.autograd.grad(dx.square().sum() + made[1].sum(), wanted)

    with use_backend("triton"):
        ours = penalty(modulated_norm)
    for a, b in zip(ours, penalty(by_operators), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_two_results_is_not_used(used):
    spec = SPECS["RMSNorm"]
    tensors = operands(spec, FP32, before="a gated sum")
    dy = random(3, 5, dtype=FP32, seed=7)

    def gradients(function):
        x, *others, residual = tensors
        x = x.clone().requires_grad_()
        residual = residual.clone().requires_grad_()
        made = function(spec, (x, *others, residual))
        return torch.autograd.grad(made[used], (x, residual), dy)

    with use_backend("triton"):
        ours = gradients(modulated_norm)
    for a, b in zip(ours, gradients(by_operators), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
