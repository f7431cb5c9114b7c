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
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(
        DEVICE, dtype
    )


def parameters(spec, size, dtype):
    weight = 1 - spec.weight_offset + 0.3 * random(size, dtype=FP32, seed=8)
    return weight.to(dtype), random(
        size, dtype=dtype, seed=9
    ) if spec.has_bias else None


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
        y = fused_norm(
            x.requires_grad_(), weight, bias, spec, gate=gate.requires_grad_()
        )
        return y, *torch.autograd.grad(y, (x, gate), dy)

    return run, 3


def summed(spec, size, dtype):
    weight, bias = parameters(spec, size, dtype)

    def run(x, residual, dh, dy):
        h, y = fused_add_norm(
            x.requires_grad_(), residual.requires_grad_(), weight, bias, spec
        )
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
    weights = []
    for _ in range(2):
        weights.append(parameters(spec, size // 8, dtype)[0])

    def run(rows, dy, angles):
        rows, dy, angles = (
            t.reshape(-1, *t.shape[-2:]) if t.dim() > 2 else t[None]
            for t in (rows, dy, angles)
        )
        angles = angles[..., : size // 8].float()
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        q, k = (
            t.unflatten(-1, (-1, size // 8)).transpose(1, 2)
            for t in rows.split((size // 2, size // 2), -1)
        )
        dq, dk = (
            t.unflatten(-1, (-1, size // 8)).transpose(1, 2)
            for t in dy.split((size // 2, size // 2), -1)
        )
        q = q.detach().requires_grad_()
        k = k.detach().requires_grad_()
        yq, yk = fused_qk_norm(q, k, *weights, spec, *tables)
        grads = torch.autograd.grad(
            (yq, yk), (q, k), (dq.to(yq.dtype), dk.to(yk.dtype))
        )
        return tuple(
            t.transpose(1, 2).flatten(-2).flatten(0, -2) for t in (yq, yk, *grads)
        )

    return run, 3


def outputs(run, operands, offset):
    placed = []
    for t in operands:
        placed.append(t.new_empty(t.numel() + offset)[offset:].view(t.shape).copy_(t))
    with use_backend("triton"), count_launches() as launches:
        found = run(*placed)
    assert launches
    return [t.detach().flatten(0, -2) for t in found]


def check(made, size, dtype, shapes=SHAPES, offset=0):
    run, count = made
    full = [random(64, size, dtype=dtype, seed=seed) for seed in range(count)]
    expected = [t[ROW] for t in outputs(run, full, offset)]
    for shape in shapes:
        rows = torch.Size(shape).numel()
        for place in {0, rows - 1}:
            batch = []
            for _ in full:
                batch.append(
                    torch.full((rows, size), torch.nan, dtype=dtype, device=DEVICE)
                )
            for t, whole in zip(batch, full, strict=True):
                t[place] = whole[ROW]
            for a, b in zip(
                outputs(run, [t.view(*shape, size) for t in batch], offset),
                expected,
                strict=True,
            ):
                assert torch.equal(a[place], b), (shape, place)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [96, 1000, 4096, 14_336])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_norm(name, size, dtype):
    check(
        norm(SPECS[name], size, dtype),
        size,
        dtype,
        SHAPES if size < 14_336 else [(1,), (3,), (2, 3)],
    )


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
    check(
        summed(SPECS[name], size, BF16),
        size,
        BF16,
        SHAPES if size < 14_336 else [(1,), (3,)],
    )


@pytest.mark.parametrize("size", [96, 4096, 14_336])
def test_a_norm_of_a_sum_before_it_is_rounded(size):
    check(
        unrounded(SPECS["RMSNorm"], size, BF16),
        size,
        BF16,
        SHAPES if size < 14_336 else [(1,), (3,)],
    )


@pytest.mark.parametrize("size", [256, 4096])
def test_a_backward_from_the_output(size):
    check(norm(SPECS["RMSNorm"], size, BF16, keep_output=True), size, BF16)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads(head_dim):
    shapes = [(1,), (2,), (3,), (7,), (64,)]
    check(heads(SPECS["RMSNorm"], 8 * head_dim, BF16), 8 * head_dim, BF16, shapes)


def test_one_row_of_a_thousand():
    check(norm(SPECS["RMSNorm"], 96, BF16), 96, BF16, [(1000,)])


@pytest.mark.parametrize("size", [96, 4096])
def test_gradients_of_parameters_are_equal_for_equal_rows(size):
    """The same rows in the same order on the same device; another order or device may
    differ in last bits.
    """
    spec = SPECS["LayerNorm"]
    weight, bias = (t.requires_grad_() for t in parameters(spec, size, BF16))
    x, dy = (random(300, size, dtype=BF16, seed=seed) for seed in range(2))
    with use_backend("triton"):
        first, again = (
            torch.autograd.grad(
                fused_norm(t, weight, bias, spec), (weight, bias), d.reshape(t.shape)
            )
            for t, d in ((x, dy), (x.clone().view(3, 100, size), dy))
        )
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("size", [96, 1000, 4096])
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_tensors_that_start_anywhere(name, size):
    """They run another variant, whose sums may differ in a last bit from that of
    tensors at multiples of 16 bytes.
    """
    check(norm(SPECS[name], size, FP32), size, FP32, [(1,), (3,), (2, 3)], offset=1)
    check(summed(SPECS[name], size, BF16), size, BF16, [(1,), (3,)], offset=1)
