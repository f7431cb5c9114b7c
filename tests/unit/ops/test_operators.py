"""The registered operators: what torch itself checks of them, and that they serve what
the kernels do not.
"""

from itertools import permutations

import pytest
import torch

from hf_rmsnorm import NormSpec
from hf_rmsnorm.ops.operators import norm_backward_op, norm_forward_op, spec_args
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(True, 1e-5, has_bias=True, functional=True)


def random(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def calls_of_norms():
    x = random(2, 5, 64)
    weight = random(64)
    bias = random(64)
    gate = random(2, 5, 64)
    heads = random(5, 64)
    layer = spec_args(LAYER_NORM)
    llama = spec_args(LLAMA)
    gated = spec_args(
        NormSpec(False, 1e-6, rounding="before_weight", gate="silu_before")
    )
    gemma = spec_args(NormSpec(False, 1e-6, weight_offset=1.0))
    plain = spec_args(NormSpec(False, 1e-6, has_weight=False))
    yield norm_forward_op, (x, weight, bias, None, *layer, True)
    yield norm_forward_op, (x, weight, None, None, *llama, False)
    yield norm_forward_op, (x.transpose(0, 1), weight, None, None, *gemma, True)
    yield norm_forward_op, (x.bfloat16(), weight, None, None, *llama, True)
    yield norm_forward_op, (x[:0], None, None, None, *plain, True)
    yield norm_forward_op, (x, weight, None, gate, *gated, True)
    yield norm_forward_op, (x, heads, None, None, *llama, True)
    rstd = torch.rand(10)
    mean = torch.rand(10)
    empty = torch.rand(0)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    of_llama = rstd, empty, *llama
    of_layer = rstd, mean, *layer, [True, True, True, False]
    half = gate.bfloat16()
    of_gated = rstd, empty, *gated, [True, True, False, True]
    yield norm_backward_op, (x, x, weight, bias, None, *of_layer)
    yield norm_backward_op, (x, x, weight, None, half, *of_gated)
    for rows, parameter, needed in (
        (x, weight, [True, False, False, False]),
        (other, weight, [False, True, False, False]),
        (x, heads, [True, True, False, False]),
    ):
        yield norm_backward_op, (x, rows, parameter, None, None, *of_llama, needed)


@pytest.mark.full
def test_opcheck():
    for operator, args in calls_of_norms():
        torch.library.opcheck(
            operator, tuple(a.to(DEVICE) if torch.is_tensor(a) else a for a in args)
        )


def orders(t):
    """t in strides by which the kernels number its rows in other orders."""
    for order in permutations(range(t.dim() - 1)):
        back = [order.index(d) for d in range(t.dim() - 1)]
        yield t.permute(*order, -1).contiguous().permute(*back, -1)


FORMULAS = {
    "llama": (LLAMA, False),
    "layer norm": (NormSpec(True, 1e-5, has_bias=True), False),
    "functional": (LAYER_NORM, False),
    "gate": (NormSpec(False, 1e-6, gate="silu_after"), False),
    "heads": (LLAMA, True),
}


def by_operators(spec, dy, x, weight, bias, gate):
    """(y, rstd, mean, dx, dweight, dbias, dgate)."""
    formula = spec_args(spec)
    need = [True, True, bias is not None, gate is not None]
    read = x, weight, bias, gate
    y, *stats = norm_forward_op(*read, *formula, True)
    grads = norm_backward_op(dy, *read, *stats, *formula, need)
    assert [g.numel() > 0 for g in grads] == need
    assert grads[0].stride() == y.stride()
    return y, *stats, *grads


def by_formula(spec, dy, x, weight, bias, gate):
    """(y, and the gradients of what is there)."""
    leaves = [t for t in (x, weight, bias, gate) if t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    y = reference_norm(x, weight, bias, spec, gate)
    return y, *torch.autograd.grad(y, leaves, dy)


def assert_near(ours, theirs, rtol, atol):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.flatten(), b.flatten(), rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64], ids=["served", "not served"]
)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(6, 4, 16), (2, 3, 4, 16)])
def test_statistics_are_those_of_each_row_whatever_the_order_of_rows(
    name, shape, dtype
):
    """Whoever splits x, and whoever takes the backward by itself, finds the row's
    statistics at the row's place.
    """
    spec, of_heads = FORMULAS[name]
    x = random(*shape).to(dtype)
    dy = random(*shape, seed=4).to(dtype)
    weight = random(4, 16, seed=5) if of_heads else random(16, seed=5)
    bias = random(16, seed=6).to(dtype) if spec.has_bias else None
    gate = random(*shape, seed=7).to(dtype) if spec.gate else None
    others = weight.to(dtype), bias, gate
    first = by_operators(spec, dy, x, *others)
    of_rows = shape[:-1]
    assert first[1].shape == of_rows
    assert first[2].shape == (of_rows if spec.centered else (0,))
    for strided in orders(x):
        made = by_operators(spec, dy, strided, *others)
        layout = x if spec.functional else strided
        assert made[0].stride() == layout.stride()
        assert_near(made, first, 1e-5, 1e-6)
    gradients = [g for g in first[3:] if g.numel()]
    expected = by_formula(spec, dy, x, *others)
    assert_near([first[0], *gradients], expected, 1e-4, 1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("rounding", ["before_weight", "weight_dtype", "once"])
def test_what_the_reference_serves_has_the_dtype_of_eager(rounding, weight_dtype):
    spec = NormSpec(
        False,
        1e-6,
        has_weight=weight_dtype is not None,
        rounding="once" if weight_dtype is None else rounding,
    )
    x = random(3, 2 * 16_400).bfloat16()  # too wide for the kernels
    weight = None if weight_dtype is None else random(2 * 16_400).to(weight_dtype)
    for each, w in (
        (x[:, :64].double(), None if weight is None else weight[:64]),
        (x, weight),
    ):
        y, *_ = norm_forward_op(each, w, None, None, *spec_args(spec), False)
        expected = reference_norm(each, w, None, spec)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


def test_formulas_that_no_arguments_tell_are_refused():
    with pytest.raises(TypeError, match="the operators do not take"):
        spec_args(NormSpec(False, 1e-6, group_size=8))
