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
    x, weight, bias, gate, heads = (
        random(2, 5, 64),
        random(64),
        random(64),
        random(2, 5, 64),
        random(5, 64),
    )
    layer, llama = spec_args(LAYER_NORM), spec_args(LLAMA)
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
    rstd, mean, empty = torch.rand(10), torch.rand(10), torch.rand(0)
    other = x.transpose(0, 1).contiguous().transpose(0, 1)
    for args in (
        (x, x, weight, bias, None, None, rstd, mean, *layer, [True, True, True, False]),
        (x, x, weight, bias, None, gate, rstd, mean, *layer, [True, True, True, False]),
        (
            x,
            x,
            weight,
            None,
            None,
            None,
            rstd,
            empty,
            *llama,
            [True, False, False, False],
        ),
        (
            x,
            x,
            weight,
            None,
            None,
            other,
            rstd,
            empty,
            *llama,
            [True, False, False, False],
        ),
        (
            x,
            other,
            weight,
            None,
            None,
            None,
            rstd,
            empty,
            *llama,
            [False, True, False, False],
        ),
        (
            x,
            x,
            weight,
            None,
            gate.bfloat16(),
            None,
            rstd,
            empty,
            *gated,
            [True, True, False, True],
        ),
        (
            x,
            x,
            heads,
            None,
            None,
            None,
            rstd,
            empty,
            *llama,
            [True, True, False, False],
        ),
    ):
        yield norm_backward_op, args


@pytest.mark.full
def test_opcheck():
    for operator, args in calls_of_norms():
        torch.library.opcheck(
            operator, tuple(a.to(DEVICE) if torch.is_tensor(a) else a for a in args)
        )


def orders(t):
    """t in strides by which the kernels number its rows in other orders."""
    for order in permutations(range(t.dim() - 1)):
        yield (
            t.permute(*order, -1)
            .contiguous()
            .permute(*(order.index(d) for d in range(t.dim() - 1)), -1)
        )


FORMULAS = {
    "llama": (LLAMA, False), "layer norm": (NormSpec(True, 1e-5, has_bias=True), False),
    "functional": (LAYER_NORM, False),
    "gate": (NormSpec(False, 1e-6, gate="silu_after"), False), "heads": (LLAMA, True),
}  # fmt: skip


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
    x, dy = random(*shape).to(dtype), random(*shape, seed=4).to(dtype)
    weight = (random(4, 16, seed=5) if of_heads else random(16, seed=5)).to(dtype)
    bias = random(16, seed=6).to(dtype) if spec.has_bias else None
    gate = random(*shape, seed=7).to(dtype) if spec.gate else None
    need, dh = (
        [True, True, bias is not None, gate is not None],
        None if spec.gate else dy,
    )
    found = []
    for each in orders(x):
        y, rstd, mean = norm_forward_op(
            each, weight, bias, gate, *spec_args(spec), True
        )
        assert rstd.shape == shape[:-1] and mean.shape == (
            shape[:-1] if spec.centered else (0,)
        )
        assert y.stride() == (x if spec.functional else each).stride()
        grads = norm_backward_op(
            dy, each, weight, bias, gate, dh, rstd, mean, *spec_args(spec), need
        )
        assert [g.numel() > 0 for g in grads] == need and grads[
            0
        ].stride() == y.stride()
        found.append([t.flatten() for t in (y, rstd, mean, *grads)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    leaves = [
        t if t is None else t.clone().requires_grad_() for t in (x, weight, bias, gate)
    ]
    y = reference_norm(*leaves[:3], spec, leaves[3])
    expected = torch.autograd.grad(y, [t for t in leaves if t is not None], dy)
    expected = (expected[0] + dy if gate is None else expected[0], *expected[1:])
    for a, b in zip(
        [y, *expected],
        [found[0][0], *(g for g in found[0][3:] if g.numel())],
        strict=True,
    ):
        torch.testing.assert_close(a.flatten(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("rounding", ["before_weight", "weight_dtype", "once"])
def test_what_the_reference_serves_has_the_dtype_of_eager(rounding, weight_dtype):
    spec = NormSpec(False, 1e-6, has_weight=weight_dtype is not None,
                    rounding="once" if weight_dtype is None else rounding)  # fmt: skip
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
