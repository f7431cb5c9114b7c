"""What a row becomes depends on no other row: not on how many there are, where it
stands, or what the others hold.
"""

import pytest
import torch
from add_norm import fused_add_norm
from heads import fused_qk_norm

from hf_rmsnorm import NormSpec, count_launches, use_backend
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.ops.modulated import modulated_norm
from hf_rmsnorm.ops.unrounded import norm_of_summands

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
SPECS = {
    "RMSNorm": NormSpec(False, 1e-6, rounding="before_weight"),
    "Gemma": NormSpec(False, 1e-6, weight_offset=1.0),
    "LayerNorm": NormSpec(True, 1e-5, has_bias=True, functional=True),
    "rounded rstd": NormSpec(False, 1e-6, rounding="rstd"),
    "gate before": NormSpec(False, 1e-5, rounding="before_weight", gate="silu_before"),
    "gate after": NormSpec(True, 1e-5, has_bias=True, gate="sigmoid_after"),
}
SHAPES = [(1,), (2,), (3,), (7,), (64,), (2, 3), (7, 9)]
ROW = 5  # of the batch that the others are compared with


def random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values.to(DEVICE, dtype)


def parameters(spec, size, dtype):
    weight = 0.3 * random(size, dtype=FP32, seed=8)
    weight = weight + 1 - spec.weight_offset
    bias = None
    if spec.has_bias:
        bias = random(size, dtype=dtype, seed=9)
    return weight.to(dtype), bias


def norm(spec, size, dtype, **options):
    weight, bias = parameters(spec, size, dtype)

    def run(x, dy):
        x = x.requires_grad_()
        y = fused_norm(x, weight, bias, spec, **options)
        return y, *torch.autograd.grad(y, x, dy)

    return run, 2


def gated(spec, size, dtype):
    weight, bias = parameters(spec, size, dtype)

    def run(x, gate, dy):
        x.requires_grad_()
        gate.requires_grad_()
        y = fused_norm(x, weight, bias, spec, gate=gate)
        return y, *torch.autograd.grad(y, (x, gate), dy)

    return run, 3


def summed(spec, size, dtype):
    weight, bias = parameters(spec, size, dtype)

    def run(x, residual, dh, dy):
        x.requires_grad_()
        residual.requires_grad_()
        h, y = fused_add_norm(x, residual, weight, bias, spec)
        return h, y, *torch.autograd.grad((h, y), (x, residual), (dh, dy))

    return run, 4


def modulated(spec, size, dtype):
    weight, bias = parameters(spec, size, dtype)

    def run(*operands):
        *operands, dh, dy = operands
        x, residual, factor, scale, shift = (t.requires_grad_() for t in operands)
        h, y = modulated_norm(spec, (x, weight, bias, scale, shift, factor, residual))
        return h, y, *torch.autograd.grad((h, y), operands, (dh, dy))

    return run, 7


def unrounded(spec, size, dtype):
    weight, _ = parameters(spec, size, dtype)

    def run(left, right, dy):
        total = (left + right).requires_grad_()
        y = norm_of_summands(total, left, right, weight, None, spec)
        return y, *torch.autograd.grad(y, total, dy)

    return run, 3


def heads(spec, size, dtype):
    """A row is a token, of four heads of q and as many of k."""
    head_dim = size // 8
    weight, _ = parameters(spec, head_dim, dtype)

    def split(rows):
        """The heads of q and those of k."""
        rows = rows.view(-1, rows.shape[-2], 8, head_dim)
        return rows.transpose(1, 2).split((4, 4), 1)

    def run(rows, dy, angles):
        angles = angles.view(-1, *angles.shape[-2:])
        angles = angles[..., :head_dim].float()
        cos = angles.cos().to(dtype)
        sin = angles.sin().to(dtype)
        operands = [t.detach().requires_grad_() for t in split(rows)]
        outputs = fused_qk_norm(*operands, weight, weight, spec, cos, sin)
        gradients = torch.autograd.grad(outputs, operands, split(dy))
        results = []
        for t in (*outputs, *gradients):
            of_tokens = t.transpose(1, 2).flatten(-2)
            results.append(of_tokens.flatten(0, -2))
        return tuple(results)

    return run, 3


def outputs(run, operands, offset):
    placed = []
    for t in operands:
        whole = t.new_empty(t.numel() + offset)
        place = whole[offset:].view(t.shape)
        placed.append(place.copy_(t))
    with use_backend("triton"), count_launches() as launches:
        found = run(*placed)
    assert launches
    return [t.detach().flatten(0, -2) for t in found]


def check(of_rows, size, dtype, shapes=SHAPES, offset=0):
    run, count = of_rows
    full = [random(64, size, dtype=dtype, seed=seed) for seed in range(count)]
    expected = [t[ROW] for t in outputs(run, full, offset)]
    for shape in shapes:
        rows = torch.Size(shape).numel()
        for place in {0, rows - 1}:
            batch = []
            for whole in full:
                t = whole.new_full((rows, size), torch.nan)
                t[place] = whole[ROW]
                batch.append(t.view(*shape, size))
            made = outputs(run, batch, offset)
            for a, b in zip(made, expected, strict=True):
                assert torch.equal(a[place], b), (shape, place)


def shapes_of(size):
    """Fewer of wide rows."""
    if size < 14_336:
        return SHAPES
    return [(1,), (3,), (2, 3)]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [96, 1000, 4096, 14_336])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_norm(name, size, dtype):
    check(norm(SPECS[name], size, dtype), size, dtype, shapes_of(size))


@pytest.mark.parametrize("name", ["Gemma", "rounded rstd"])
def test_other_formulas(name):
    check(norm(SPECS[name], 256, BF16), 256, BF16)


@pytest.mark.parametrize("name", ["gate before", "gate after"])
def test_a_gated_norm(name):
    check(gated(SPECS[name], 256, BF16), 256, BF16)


@pytest.mark.parametrize("size", [96, 1000, 3072])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_gated_sum_and_its_modulated_norm(name, size):
    check(modulated(SPECS[name], size, BF16), size, BF16)


@pytest.mark.parametrize("size", [96, 1000, 4096, 14_336])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_residual_sum_and_its_norm(name, size):
    check(summed(SPECS[name], size, BF16), size, BF16, shapes_of(size))


@pytest.mark.parametrize("size", [96, 4096, 14_336])
def test_a_norm_of_a_sum_before_it_is_rounded(size):
    check(unrounded(SPECS["RMSNorm"], size, BF16), size, BF16, shapes_of(size))


@pytest.mark.parametrize("size", [256, 4096])
def test_a_backward_from_the_output(size):
    check(norm(SPECS["RMSNorm"], size, BF16, keep_output=True), size, BF16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(head_dim):
    shapes = [(1,), (2,), (3,), (7,), (64,)]
    check(heads(SPECS["RMSNorm"], 8 * head_dim, BF16), 8 * head_dim, BF16, shapes)


@pytest.mark.parametrize("size", [96, 4096])
def test_gradients_of_parameters_are_equal_for_equal_rows(size):
    """The same rows in the same order on the same device; another order or device may
    differ in last bits.
    """
    spec = SPECS["LayerNorm"]
    leaves = [t.requires_grad_() for t in parameters(spec, size, BF16)]
    x = random(300, size, dtype=BF16, seed=0)
    dy = random(300, size, dtype=BF16, seed=1)

    def gradients(x):
        y = fused_norm(x, *leaves, spec)
        return torch.autograd.grad(y, leaves, dy.view(y.shape))

    other = x.clone().view(3, 100, size)
    with use_backend("triton"):
        first = gradients(x)
        again = gradients(other)
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("size", [96, 1000, 4096])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_tensors_that_start_anywhere(name, size):
    """They run another variant, whose sums may differ in a last bit from that of
    tensors at multiples of 16 bytes.
    """
    check(norm(SPECS[name], size, FP32), size, FP32, [(1,), (3,), (2, 3)], offset=1)
    check(summed(SPECS[name], size, BF16), size, BF16, [(1,), (3,)], offset=1)
