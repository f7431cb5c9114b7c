"""What a row becomes depends on no other row: not on how many there are, where it
stands, or what the others hold.
"""

import pytest
import torch
from add_norm import fused_add_norm
from computed import compute_norm
from heads import fused_qk_norm

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.operands import of_modulation
from hf_rmsnorm.ops.norm import modulated_norm
from tests.unit.kernels.test_norm_forward import BF16, FP32, assert_equal, random

parametrize = pytest.mark.parametrize

SPECS = {
    "RMSNorm": NormSpec(False, 1e-6, rounding="before_weight"),
    "Gemma": NormSpec(False, 1e-6, weight_offset=1.0),
    "LayerNorm": NormSpec(True, 1e-5, has_bias=True, functional=True),
    "rounded rstd": NormSpec(False, 1e-6, rounding="rstd"),
    "gate before": NormSpec(False, 1e-5, rounding="before_weight", gate="silu_before"),
    "gate after": NormSpec(True, 1e-5, has_bias=True, gate="sigmoid_after"),
}
BOTH = ["RMSNorm", "LayerNorm"]
SHAPES = [(1,), (2,), (7,), (64,), (2, 3)]
FEW = [(1,), (3,), (2, 3)]  # of wide rows
ROW = 5  # of the batch that the others are compared with


def parameters(spec, size, dtype):
    weight = random(size, dtype=dtype, seed=8, scale=0.3, mean=1 - spec.weight_offset)
    bias = None
    if spec.has_bias:
        bias = random(size, dtype=dtype, seed=9)
    return weight, bias


# Each computation takes its operands by row, and the gradients of its outputs, and
# returns its outputs and the gradients of its operands.


def norm(spec, parameters, x, dy, **options):
    x.requires_grad_()
    y = compute_norm(x, *parameters, spec, **options)
    gradients = torch.autograd.grad(y, x, dy)
    return y, *gradients


def norm_from_its_output(spec, parameters, x, dy):
    return norm(spec, parameters, x, dy, keep_output=True)


def gated_norm(spec, parameters, x, gate, dy):
    x.requires_grad_()
    gate.requires_grad_()
    y = compute_norm(x, *parameters, spec, gate=gate)
    gradients = torch.autograd.grad(y, (x, gate), dy)
    return y, *gradients


def sum_and_norm(spec, parameters, x, residual, dh, dy):
    x.requires_grad_()
    residual.requires_grad_()
    outputs = fused_add_norm(x, residual, *parameters, spec)
    gradients = torch.autograd.grad(outputs, (x, residual), (dh, dy))
    return *outputs, *gradients


def modulated(spec, parameters, x, residual, multiplier, scale, shift, dh, dy):
    operands = (x, residual, multiplier, scale, shift)
    for t in operands:
        t.requires_grad_()
    tensors = of_modulation(x, *parameters, scale, shift, multiplier, residual)
    outputs = modulated_norm(spec, tensors)
    gradients = torch.autograd.grad(outputs, operands, (dh, dy))
    return *outputs, *gradients


def split(rows):
    """Four heads of q and as many of k, of rows that are tokens."""
    *_, length, size = rows.shape
    by_head = rows.view(-1, length, 8, size // 8)
    return by_head.transpose(1, 2).split((4, 4), 1)


def joined(heads):
    by_token = heads.transpose(1, 2)
    return by_token.flatten(-2)


def heads(spec, parameters, rows, dy, angles):
    q, k = split(rows)
    q = q.detach().requires_grad_()
    k = k.detach().requires_grad_()
    weight, _ = parameters
    head_dim = len(weight)
    *_, length, _ = rows.shape
    angles = angles[..., :head_dim].float()
    angles = angles.view(-1, length, head_dim)
    cos = angles.cos().to(rows.dtype)
    sin = angles.sin().to(rows.dtype)
    outputs = fused_qk_norm(q, k, weight, weight, spec, cos, sin)
    gradients = torch.autograd.grad(outputs, (q, k), split(dy))
    return [joined(t) for t in (*outputs, *gradients)]


OPERANDS = {
    norm: 2,
    norm_from_its_output: 2,
    gated_norm: 3,
    sum_and_norm: 4,
    modulated: 7,
    heads: 3,
}


def results(compute, spec, weights, operands, offset):
    """Rows of all results, of operands that are `offset` elements behind a multiple of
    16 bytes.
    """
    placed = []
    for t in operands:
        memory = t.new_empty(offset + t.numel())
        place = memory[offset:].view(t.shape)
        place.copy_(t)
        placed.append(place)
    with use_backend("triton"), count_launches() as launches:
        tensors = compute(spec, weights, *placed)
    assert launches
    return [t.detach().flatten(0, -2) for t in tensors]


def check(compute, name, size, dtype=BF16, shapes=SHAPES, offset=0, columns=None):
    """A row gives the same bits in a batch of 64, and among rows of NaN in all shapes;
    `columns`: of the parameters, where they are fewer.
    """
    spec = SPECS[name]
    weights = parameters(spec, columns or size, dtype)
    full = []
    for seed in range(OPERANDS[compute]):
        full.append(random(64, size, dtype=dtype, seed=seed))
    of_batch = results(compute, spec, weights, full, offset)
    expected = [t[ROW] for t in of_batch]
    for shape in shapes:
        count = torch.Size(shape).numel()
        for place in {0, count - 1}:
            operands = []
            for whole in full:
                t = whole.new_full((count, size), torch.nan)
                t[place] = whole[ROW]
                operands.append(t.view(*shape, size))
            made = results(compute, spec, weights, operands, offset)
            assert_equal([t[place] for t in made], expected)


@parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@parametrize("size", [96, 1000, 4096])
@parametrize("name", BOTH)
def test_a_norm(name, size, dtype):
    check(norm, name, size, dtype)


@parametrize("compute", [norm, sum_and_norm])
@parametrize("name", BOTH)
def test_wide_rows(name, compute):
    check(compute, name, 14_336, shapes=FEW)


@parametrize("name", ["Gemma", "rounded rstd"])
def test_other_formulas(name):
    check(norm, name, 256)


@parametrize("name", ["gate before", "gate after"])
def test_a_gated_norm(name):
    check(gated_norm, name, 256)


@parametrize("size", [96, 3072, 1000])
@parametrize("name", BOTH)
def test_a_gated_sum_and_its_modulated_norm(name, size):
    check(modulated, name, size)


@parametrize("size", [96, 4096, 1000])
@parametrize("name", BOTH)
def test_a_residual_sum_and_its_norm(name, size):
    check(sum_and_norm, name, size)


@parametrize("size", [256, 4096])
def test_a_backward_from_the_output(size):
    check(norm_from_its_output, "RMSNorm", size)


@parametrize("head_dim", [64, 128])
def test_heads(head_dim):
    shapes = [(1,), (3,), (64,)]
    check(heads, "RMSNorm", 8 * head_dim, shapes=shapes, columns=head_dim)


@parametrize("size", [96, 4096, 1000])
@parametrize("name", BOTH)
def test_tensors_that_start_anywhere(name, size):
    """They run another variant, whose sums may differ in a last bit from that of
    tensors at multiples of 16 bytes.
    """
    check(norm, name, size, FP32, FEW, offset=1)
    check(sum_and_norm, name, size, BF16, FEW[:2], offset=1)
