"""The registered operators: what torch itself checks of them, and that they serve what the kernels do not."""

from itertools import permutations

import pytest
import torch

from hf_rmsnorm import NormSpec, count_launches
from hf_rmsnorm.ops.loading import kernels
from hf_rmsnorm.ops.operators import (
    add_norm_forward_op,
    as_saved,
    norm_backward_op,
    norm_forward_op,
    qk_as_saved,
    qk_norm_backward_op,
    qk_norm_forward_op,
    spec_args,
)
from hf_rmsnorm.reference import reference_norm, reference_qk_norm

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
    none, every = (None, None), [True] * 4 + [False] * 2
    for tables, spec, grads, need in (
        (none, LLAMA, (dq, None), every),
        (whole, LLAMA, (dq, dk), every),
        (part, LLAMA, (dq, dk), [True, False, False, True, False, False]),
        (part, layer, (dq, dk), every),
    ):
        args = (q, k, *weights, None, None, *tables, "", *spec_args(spec))
        yield qk_norm_forward_op, (*args, True)
        *_, rstd, mean = qk_norm_forward_op(*args, True)
        yield qk_norm_backward_op, (*grads, q, k, *weights, None, None, *tables, rstd, mean, *spec_args(spec), need)
    yield qk_norm_forward_op, (q, k, *weights, None, None, *whole, "", *spec_args(layer), False)
    wide = [t.float() for t in whole]
    yield qk_norm_forward_op, (q, k, *weights, None, None, *wide, "once", *spec_args(LLAMA), True)
    biased = NormSpec(True, 1e-5, has_bias=True)
    biases = [random(16, seed=seed).bfloat16() for seed in (5, 6)]
    args = (q, k, *weights, *biases, None, None)
    yield qk_norm_forward_op, (*args, "", *spec_args(biased), True)
    *_, rstd, mean = qk_norm_forward_op(*args, "", *spec_args(biased), True)
    yield qk_norm_backward_op, (dq, dk, *args, rstd, mean, *spec_args(biased), [True] * 6)
    for shape, spec in ((lambda heads: (heads, 16), LLAMA), (lambda heads: (heads * 16,), LLAMA)):
        parameters = [random(*shape(heads), seed=heads).bfloat16() for heads in (4, 2)]
        args = (q, k, *parameters, None, None, *whole)
        yield qk_norm_forward_op, (*args, "", *spec_args(spec), True)
        *_, rstd, mean = qk_norm_forward_op(*args, "", *spec_args(spec), True)
        yield qk_norm_backward_op, (dq, dk, *args, rstd, mean, *spec_args(spec), every)


@pytest.mark.full
@pytest.mark.parametrize("calls", [calls_of_norms, calls_of_sums, calls_of_heads])
def test_opcheck(calls):
    for operator, args in calls():
        torch.library.opcheck(operator, tuple(a.to(DEVICE) if torch.is_tensor(a) else a for a in args))


def test_a_sum_and_its_norm_are_one_launch_of_their_operator(monkeypatch):
    x, residual, weight = random(3, 8), random(3, 8, seed=1), random(8)
    real, sums = kernels().norm_forward, []
    monkeypatch.setattr(kernels(), "norm_forward", lambda *args: (sums.append(args[6]), real(*args))[1])
    h, y, *_ = add_norm_forward_op(x, residual, weight, None, *spec_args(LLAMA), False)
    assert len(sums) == 1 and torch.equal(sums[0], residual) and torch.equal(h, residual + x)
    torch.testing.assert_close(y, reference_norm(h, weight, None, LLAMA))


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


def orders(t):
    """t in strides by which the kernels number its rows in other orders."""
    for order in permutations(range(t.dim() - 1)):
        yield t.permute(*order, -1).contiguous().permute(*(order.index(d) for d in range(t.dim() - 1)), -1)


FORMULAS = {
    "llama": (LLAMA, False), "layer norm": (NormSpec(True, 1e-5, has_bias=True), False),
    "functional": (LAYER_NORM, False), "gate": (NormSpec(False, 1e-6, gate="silu_after"), False),
    "heads": (LLAMA, True),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["served", "not served"])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(6, 4, 16), (2, 3, 4, 16)])
def test_statistics_are_those_of_each_row_whatever_the_order_of_rows(name, shape, dtype):
    """Whoever splits x, and whoever takes the backward by itself, finds the row's statistics at the row's place."""
    spec, of_heads = FORMULAS[name]
    x, dy = random(*shape).to(dtype), random(*shape, seed=4).to(dtype)
    weight = (random(4, 16, seed=5) if of_heads else random(16, seed=5)).to(dtype)
    bias = random(16, seed=6).to(dtype) if spec.has_bias else None
    gate = random(*shape, seed=7).to(dtype) if spec.gate else None
    need, dh = [True, True, bias is not None, gate is not None], None if spec.gate else dy
    found = []
    for each in orders(x):
        y, rstd, mean = norm_forward_op(each, weight, bias, gate, *spec_args(spec), True)
        assert rstd.shape == shape[:-1] and mean.shape == (shape[:-1] if spec.centered else (0,))
        assert y.stride() == (x if spec.functional else each).stride()
        grads = norm_backward_op(dy, each, weight, bias, gate, dh, rstd, mean, *spec_args(spec), need)
        assert [g.numel() > 0 for g in grads] == need and grads[0].stride() == y.stride()
        found.append([t.flatten() for t in (y, rstd, mean, *grads)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    leaves = [t if t is None else t.clone().requires_grad_() for t in (x, weight, bias, gate)]
    y = reference_norm(*leaves[:3], spec, leaves[3])
    expected = torch.autograd.grad(y, [t for t in leaves if t is not None], dy)
    expected = (expected[0] + dy if gate is None else expected[0], *expected[1:])
    for a, b in zip([y, *expected], [found[0][0], *(g for g in found[0][3:] if g.numel())], strict=True):
        torch.testing.assert_close(a.flatten(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["served", "not served"])
def test_statistics_of_sums_are_those_of_each_row(dtype):
    x, residual, weight = random(2, 3, 4, 16).to(dtype), random(2, 3, 4, 16, seed=4).to(dtype), random(16).to(dtype)
    found = []
    for a, b in zip(orders(x), orders(residual), strict=True):
        h, y, rstd, mean = add_norm_forward_op(a, b, weight, None, *spec_args(LLAMA), True)
        assert h.stride() == y.stride() == (a + b).stride() and rstd.shape == x.shape[:-1] and not mean.numel()
        assert not add_norm_forward_op(a, b, weight, None, *spec_args(LLAMA), False)[2].numel()
        found.append((h, y, rstd))
    for each in found:
        for a, b in zip(found[0], each, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0][0], residual + x)
    torch.testing.assert_close(found[0][1], reference_norm(residual + x, weight, None, LLAMA), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("rounding", ["before_weight", "weight_dtype", "once"])
def test_what_the_reference_serves_has_the_dtype_of_eager(rounding, weight_dtype):
    spec = NormSpec(False, 1e-6, has_weight=weight_dtype is not None,
                    rounding="once" if weight_dtype is None else rounding)  # fmt: skip
    x = random(3, 2 * 16_400).bfloat16()  # too wide for the kernels
    weight = None if weight_dtype is None else random(2 * 16_400).to(weight_dtype)
    for each, w in ((x[:, :64].double(), None if weight is None else weight[:64]), (x, weight)):
        y, *_ = norm_forward_op(each, w, None, None, *spec_args(spec), False)
        expected = reference_norm(each, w, None, spec)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["served", "not served"])
@pytest.mark.parametrize("spec", [LLAMA, NormSpec(True, 1e-5)], ids=["llama", "centred"])
def test_operators_of_queries_and_keys(spec, dtype):
    q, k = random(2, 5, 4, 16).to(dtype).transpose(1, 2), random(2, 5, 2, 16, seed=4).to(dtype).transpose(1, 2)
    weights = random(16, seed=5).to(dtype), random(16, seed=6).to(dtype)
    tables = random(1, 5, 16, seed=7).to(dtype), random(1, 5, 16, seed=8).to(dtype)
    dq, dk = random(2, 4, 5, 16, seed=9).to(dtype), random(2, 2, 5, 16, seed=10).to(dtype)
    args = (q, k, *weights, None, None, *tables)
    leaves = [t.clone().requires_grad_() for t in args[:4]]
    expected = reference_qk_norm(*leaves, spec, *tables)
    served = dtype == torch.float32
    for tables_of_stats in (True, False):
        with count_launches() as launches:
            yq, yk, rstd, mean = qk_norm_forward_op(*args, "", *spec_args(spec), tables_of_stats)
        assert launches.get("qk_norm_forward", 0) == served
        rows = 2 * 5 * 6 if tables_of_stats else 0
        assert rstd.numel() == rows and mean.numel() == (rows if spec.centered else 0)
        for a, b in zip((yq, yk), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        for of_leaves in ([True] * 4, [True, False, False, True], [False, True, True, False]):
            need = of_leaves + [False] * 2
            for given in ((dq, dk), (dq, None), (None, dk)):
                with count_launches() as launches:
                    grads = qk_norm_backward_op(*given, *args, rstd, mean, *spec_args(spec), need)
                assert launches.get("qk_norm_backward", 0) == served
                pairs = [(y, d) for y, d in zip(expected, given, strict=True) if d is not None]
                ys, ds = zip(*pairs, strict=True)
                right = torch.autograd.grad(ys, leaves, ds, retain_graph=True, allow_unused=True)
                for got, wanted, needed in zip(grads[:4], right, of_leaves, strict=True):
                    if not needed or wanted is None:
                        assert not got.numel()
                    else:
                        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_statistics_of_queries_and_keys_are_alike_wherever_they_are_computed():
    q, k = random(2, 5, 4, 16).transpose(1, 2), random(2, 5, 2, 16, seed=4).transpose(1, 2)
    spec = NormSpec(True, 1e-5, has_weight=False)
    operands = q, k, *[None] * 6
    of_kernels, of_reference = (
        qk_norm_forward_op(*(t if t is None else t.to(dtype) for t in operands), "", *spec_args(spec), True)[2:]
        for dtype in (torch.float32, torch.float64)
    )
    for a, b in zip(of_kernels, of_reference, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-6)


def test_formulas_that_no_arguments_tell_are_refused():
    with pytest.raises(TypeError, match="the operators do not take"):
        spec_args(NormSpec(False, 1e-6, group_size=8))


@pytest.mark.parametrize("at", range(3))
def test_saved_tensors_are_laid_out_as_they_were(at):
    tensors = [random(4, 6, seed=i) for i in range(3)]
    strides = tensors[0].stride()
    for before, after in zip(tensors, as_saved(strides, *tensors), strict=True):
        assert before is after
    tensors[at] = tensors[at].t().contiguous().t()
    for before, after in zip(tensors, as_saved(strides, *tensors), strict=True):
        assert torch.equal(before, after) and after.is_contiguous()
    assert as_saved(strides, tensors[0], None, None)[1:] == (None, None)


@pytest.mark.parametrize("at", range(8))
def test_saved_queries_keys_and_tables_have_columns_of_unit_stride_and_tables_of_one_kind(at):
    tensors = (*(random(2, 3, 4, 8, seed=i) for i in range(2)), *(random(8, seed=i) for i in range(4)),
               *(random(1, 4, 8, seed=i) for i in range(2)))  # fmt: skip
    assert qk_as_saved(tensors) is tensors
    gaps = torch.stack([tensors[at]] * 2, -1)[..., 0] if at < 6 else torch.cat([tensors[at]] * 2, -1)[..., :8]
    found = qk_as_saved((*tensors[:at], gaps, *tensors[at + 1 :]))
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, tensors, strict=True))
