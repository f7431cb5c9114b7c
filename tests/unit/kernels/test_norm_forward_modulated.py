"""A norm with the scale and shift of an adaptive LayerNorm, and the gated sum before it,
in one launch, compiled, against torch's operators.
"""

import pytest
import torch
from judged import in_another_order, judge, leaves_of

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.operands import ALONE, ONE_PLUS, NormOperands, of_modulation
from hf_rmsnorm.ops.norm import modulated_norm
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_norm_forward import BF16, FP32, random

parametrize = pytest.mark.parametrize

SPECS = {
    "LayerNorm": NormSpec(True, 1e-6, has_weight=False, functional=True),
    "LayerNorm with weight and bias": NormSpec(
        True, 1e-6, has_bias=True, functional=True
    ),
    "RMSNorm": NormSpec(False, 1e-6, rounding="before_weight"),
    "RMSNorm, one rounding": NormSpec(False, 1e-6),
}
ROWS = (3, 5, 96)
# Of the scale and shift.
SHAPES = {
    "one per sequence": (3, 1, 96),
    "one per token": (3, 5, 96),
    "one": (96,),
}
BEFORE = ["no sum", "a sum", "a gated sum"]


def operands(spec, dtype, shape=(3, 1, 96), before="no sum"):
    weight = None
    bias = None
    multiplier = None
    residual = None
    if spec.has_weight:
        weight = random(96, dtype=dtype, seed=1, scale=0.3, mean=1.0)
    if spec.has_bias:
        bias = random(96, dtype=dtype, seed=2, scale=0.3, mean=1.0)
    if before == "a gated sum":
        multiplier = random(*shape, dtype=dtype, seed=5)
    if before != "no sum":
        residual = random(*ROWS, dtype=dtype, seed=6)
    x = random(*ROWS, dtype=dtype, seed=0)
    scale = random(*shape, dtype=dtype, seed=3, scale=0.5)
    shift = random(*shape, dtype=dtype, seed=4)
    made = of_modulation(x, weight, bias, scale, shift, multiplier, residual)
    return NormOperands(*made)


def upstream(operands):
    """Gradients of the results that there are: the sum, and the norm."""
    dy = random(*ROWS, dtype=operands.x.dtype, seed=8)
    if operands.residual is None:
        return [dy]
    return [random(*ROWS, dtype=operands.x.dtype, seed=7), dy]


def by_operators(spec, operands, modulation=ONE_PLUS):
    """What the model computes."""
    x, weight, bias, _, scale, shift, multiplier, residual = operands
    h = x
    if multiplier is not None:
        h = multiplier * x
    if residual is not None:
        h = residual + h
    y = reference_norm(h, weight, bias, spec)
    if modulation == ONE_PLUS:
        scale = 1 + scale
    y = y * scale
    if shift is not None:
        y = y + shift
    if residual is None:
        return None, y
    return h, y


def within_sequences(tensors, shape, seed):
    """The tensors, those of a shape with the tokens of each sequence shuffled alike."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(shape[1], generator=generator)
    return [t[:, order] if t is not None and t.shape == shape else t for t in tensors]


def check(spec, operands, **options):
    """All results and gradients; returns those of the kernels, and eager's."""

    def of(function):
        def compute(*operands):
            results = function(spec, operands, **options)
            return [t for t in results if t is not None]

        return compute

    reorder = in_another_order
    if operands.scale.shape == (3, 1, 96):
        reorder = within_sequences
    functions = of(modulated_norm), of(by_operators)
    with count_launches() as launches:
        made = judge(*functions, operands, upstream(operands), reorder)
    assert launches["norm_forward"] == 1
    assert launches["norm_backward"] == 1
    return made


@parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@parametrize("shape", SHAPES.values(), ids=SHAPES)
@parametrize("before", BEFORE)
@parametrize("name", SPECS)
def test_forward_and_backward(name, before, shape, dtype):
    spec = SPECS[name]
    fused, eager = check(spec, operands(spec, dtype, shape, before))
    y = 0
    if before != "no sum":
        assert torch.equal(fused[0], eager[0])
        y = 1
    if dtype != FP32:
        differs = fused[y] != eager[y]
        assert differs.float().mean() <= 1e-3


def test_a_scale_without_a_shift():
    spec = SPECS["RMSNorm"]
    tensors = operands(spec, BF16)._replace(shift=None)
    fused, eager = check(spec, tensors)
    assert torch.equal(fused[0], eager[0])


def test_a_factor_that_is_multiplied_as_it_is():
    spec = SPECS["RMSNorm"]
    fused, eager = check(spec, operands(spec, BF16), modulation=ALONE)
    assert torch.equal(fused[0], eager[0])


def test_scale_and_shift_that_are_parts_of_one_tensor():
    spec = SPECS["LayerNorm"]
    whole = random(3, 1, 2 * 96, dtype=BF16, seed=3)
    scale, shift = whole.chunk(2, dim=-1)
    tensors = operands(spec, BF16)._replace(scale=scale, shift=shift)
    with use_backend("triton"), torch.no_grad():
        _, y = modulated_norm(spec, tensors)
    _, expected = by_operators(spec, tensors)
    assert torch.equal(y, expected)


def in_columns(t):
    return t.mT.contiguous().mT


SCALES = {
    "of another batch": (4, 1, 96),
    "that x is broadcast to": (2, 3, 5, 96),
    "one for a whole row": (3, 5, 1),
}


@parametrize("shape", SCALES.values(), ids=SCALES)
def test_scales_that_are_left_to_the_operators(shape):
    spec = SPECS["LayerNorm"]
    tensors = operands(spec, FP32, shape)
    with use_backend("triton"), torch.no_grad():
        assert modulated_norm(spec, tensors) is None


LEFT_TO_THE_OPERATORS = {
    "x in columns": ("x", in_columns),
    "residual in columns": ("residual", in_columns),
    "residual of another shape": ("residual", lambda t: t[:, :1]),
    "residual of another dtype": ("residual", torch.Tensor.float),
    "scale of another shape than shift": ("scale", lambda t: t[:1]),
    "scale of another dtype": ("scale", torch.Tensor.float),
}


@parametrize("case", LEFT_TO_THE_OPERATORS)
def test_sums_that_are_left_to_the_operators(case):
    name, change = LEFT_TO_THE_OPERATORS[case]
    spec = SPECS["LayerNorm"]
    tensors = operands(spec, BF16, before="a gated sum")
    changed = change(getattr(tensors, name))
    tensors = tensors._replace(**{name: changed})
    with use_backend("triton"), torch.no_grad():
        assert modulated_norm(spec, tensors) is None


@parametrize("used", [0, 1])
def test_one_of_the_two_results_is_not_used(used):
    spec = SPECS["RMSNorm"]
    tensors = operands(spec, FP32, before="a gated sum")
    dys = upstream(tensors)

    def gradients(function):
        leaves, present = leaves_of(tensors)
        outputs = function(spec, leaves)
        wanted = (leaves[0], leaves[-1])  # x and the residual
        return torch.autograd.grad(outputs[used], wanted, dys[used])

    with use_backend("triton"):
        fused = gradients(modulated_norm)
    eager = gradients(by_operators)
    for a, b in zip(fused, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
