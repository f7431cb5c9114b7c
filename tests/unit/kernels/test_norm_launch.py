"""What a launch computes: what is needed, and nothing else."""

import pytest
import torch
from judged import doubled, leaves_of
from kernel_calls import norm_backward, norm_forward
from tolerance import assert_as_accurate

from hf_rmsnorm import NormSpec, count_launches
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_norm_forward import BF16, FP32, random

parametrize = pytest.mark.parametrize

SPECS = {
    "rms": NormSpec(False, 1e-2, has_bias=True),
    "layer norm": NormSpec(True, 1e-2, has_bias=True),
}
NEEDS = [  # the gradients of x, weight and bias
    (True, True, True),
    (True, False, False),
    (False, True, False),
    (False, True, True),
]


def gradients_of_reference(spec, operands, dy):
    leaves, _ = leaves_of(operands)
    y = reference_norm(*leaves, spec)
    return torch.autograd.grad(y, leaves, dy)


@parametrize("need", NEEDS)
@parametrize("columns", [24, 8_200])
@parametrize("name", SPECS)
@parametrize("from_output", [False, True])
def test_what_is_needed_is_computed_and_nothing_else(name, columns, need, from_output):
    spec = SPECS[name]
    x = random(3, columns, dtype=FP32, seed=0)
    dy = random(3, columns, dtype=FP32, seed=3)
    weight = random(columns, dtype=FP32, seed=1, scale=0.1, mean=1.0)
    bias = random(columns, dtype=FP32, seed=2)
    _, y, rstd, mean = norm_forward(x, weight, bias, spec, True)
    read = x
    if from_output:
        read = y
    operands = (dy, read, weight, bias, rstd, mean)
    with count_launches() as launches:
        fused = norm_backward(*operands, spec, need, None, None, from_output)
    expected = {"norm_backward": 1}
    if any(need[1:]):
        expected["reduce_partials"] = 1
    assert launches == expected
    tensors = (x, weight, bias)
    eager = gradients_of_reference(spec, tensors, dy)
    exact = gradients_of_reference(spec, doubled(*tensors), dy.double())
    for i, needed in enumerate(need):
        if not needed:
            assert fused[i] is None
        elif not from_output:
            assert_as_accurate(fused[i], eager[i], exact[i])
        else:  # as the output was rounded
            torch.testing.assert_close(fused[i], eager[i], rtol=1e-3, atol=1e-3)


GATES = ["silu_before", "silu_after", "sigmoid_after"]


@parametrize("rounding", ["before_weight", "once"])
@parametrize("gate", GATES)
def test_gated_norms_have_the_bits_of_eager(gate, rounding):
    spec = NormSpec(False, 1e-6, rounding=rounding, gate=gate)
    x = random(64, 96, dtype=BF16, seed=0)
    other = random(64, 96, dtype=BF16, seed=1)
    weight = random(96, dtype=BF16, seed=2)
    _, y, *_ = norm_forward(x, weight, None, spec, False, other)
    same = y == reference_norm(x, weight, None, spec, other)
    # its sums have another order
    assert same.double().mean() >= 0.999
