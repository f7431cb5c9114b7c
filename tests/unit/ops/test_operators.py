"""The registered operators: what torch itself checks of them, and that they serve what the kernels do not."""

import pytest
import torch

from hf_rmsnorm import NormSpec
from hf_rmsnorm.ops.operators import (
    add_norm_forward_op,
    norm_backward_op,
    norm_forward_op,
    qk_norm_backward_op,
    qk_norm_forward_op,
    spec_args,
)
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(True, 1e-5, has_bias=True, functional=True)


def random(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def calls_of_norms():
    x, weight, bias, gate, heads = random(2, 5, 64), random(64), random(64), random(2, 5, 64), random(5, 64)
    layer, llama = spec_args(LAYER_NORM), spec_args(LLAMA)
    gated = spec_args(NormSpec(False, 1e-6, rounding="before_weight", gate="silu_before"))
    gemma = spec_args(NormSpec(False, 1e-6, weight_offset=1.0))
    plain = spec_args(NormSpec(False, 1e-6, has_weight=False))
    yield norm_forward_op, (x, weight, bias, None, *layer, True)
    yield norm_forward_op, (x, weight, None, None, *llama, False)
    yield norm_forward_op, (x.transpose(0, 1), weight, None, None, *gemma, True)
    yield norm_forward_op, (x.bfloat16(), weight, None, None, *llama, True)
    yield norm_forward_op, (x[:0], None, None, None, *plain, True)
    yield norm_forward_op, (x, weight, None, gate, *gated, True)
    yield norm_forward_op, (x, heads, None, None, *llama, True)
    rstd, mean, empty = torch.rand(10), torch.rand(10), torch.rand(0)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    for args in (
        (x, x, weight, bias, None, None, rstd, mean, *layer, [True, True, True, False]),
        (x, x, weight, bias, None, gate, rstd, mean, *layer, [True, True, True, False]),
        (x, x, weight, None, None, None, rstd, empty, *llama, [True, False, False, False]),
        (x, x, weight, None, None, other, rstd, empty, *llama, [True, False, False, False]),
        (x, other, weight, None, None, None, rstd, empty, *llama, [False, True, False, False]),
        (x, x, weight, None, gate.bfloat16(), None, rstd, empty, *gated, [True, True, False, True]),
        (x, x, heads, None, None, None, rstd, empty, *llama, [True, True, False, False]),
    ):
        yield norm_backward_op, args


def calls_of_sums():
    x, residual, weight, bias = random(2, 5, 64), random(2, 5, 64), random(64), random(64)
    llama, layer = spec_args(LLAMA), spec_args(LAYER_NORM)
    plain = spec_args(NormSpec(False, 1e-6, has_weight=False))
    for args in (
        (x, residual, weight, None, *llama, True),
        (x, residual, weight, bias, *layer, False),
        (x.transpose(0, 1), residual.transpose(0, 1), weight, bias, *layer, True),
        (x.transpose(0, 1), residual.view(5, 2, 64), weight, None, *llama, True),
        (x[:1].expand(2, 5, 64), residual, weight, None, *llama, True),
        (x[..., ::2], residual[..., ::2], None, None, *plain, True),
        (x[:0], residual[:0], None, None, *plain, True),
    ):
        yield add_norm_forward_op, args


def calls_of_heads():
    layer = NormSpec(True, 1e-5, functional=True)

    def heads(count, gap):
        return random(2, 5, (count + gap) * 16).bfloat16()[..., gap * 16 :].unflatten(-1, (count, 16)).transpose(1, 2)

    q, k, dq, dk = heads(4, 3), heads(2, 0), heads(4, 0).contiguous(), heads(2, 3)
    weights = [random(16).bfloat16() for _ in range(2)]
    whole, part = ([random(rows, 5, columns).bfloat16() for _ in range(2)] for rows, columns in ((2, 16), (1, 8)))
    none, every = (None, None), [True] * 4
    for tables, spec, grads, need in (
        (none, LLAMA, (dq, None), every),
        (whole, LLAMA, (dq, dk), every),
        (part, LLAMA, (dq, dk), [True, False, False, True]),
        (part, layer, (dq, dk), every),
    ):
        args = (q, k, *weights, *tables, *spec_args(spec))
        yield qk_norm_forward_op, (*args, True)
        *_, rstd, mean = qk_norm_forward_op(*args, True)
        yield qk_norm_backward_op, (*grads, q, k, *weights, *tables, rstd, mean, *spec_args(spec), need)
    yield qk_norm_forward_op, (q, k, *weights, *whole, *spec_args(layer), False)


@pytest.mark.full
@pytest.mark.parametrize("calls", [calls_of_norms, calls_of_sums, calls_of_heads])
def test_opcheck(calls):
    for operator, args in calls():
        torch.library.opcheck(operator, tuple(a.to(DEVICE) if torch.is_tensor(a) else a for a in args))


def test_operators_of_a_graph_serve_what_the_kernels_do_not():
    """A graph exported for float32 may be run in float64."""
    x, residual, dh, dy = (random(3, 8, seed=seed).double() for seed in range(4))
    weight = random(8).double()
    h, y, rstd, mean = add_norm_forward_op(x, residual, weight, None, *spec_args(LLAMA), True)
    leaves = [t.requires_grad_() for t in (x, residual, weight)]
    expected = residual + x, reference_norm(residual + x, weight, None, LLAMA)
    for a, b in zip((h, y), expected, strict=True):
        torch.testing.assert_close(a, b.detach())
    need = [True, True, False, False]
    saved = (h, weight.detach(), None, None, dh, rstd, mean)
    dsum, dweight, *_ = norm_backward_op(dy, *saved, *spec_args(LLAMA), need)
    for a, b in zip((dsum, dsum, dweight), torch.autograd.grad(expected, leaves, [dh, dy]), strict=True):
        torch.testing.assert_close(a, b)
