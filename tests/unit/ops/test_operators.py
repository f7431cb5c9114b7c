"""The registered operators: what torch itself checks of them, and that they serve what
the kernels do not.
"""

from itertools import permutations

import pytest
import torch
from torch.utils._pytree import tree_map_only

from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.ops import compute_norm
from hf_rmsnorm.ops.operators import norm_backward_op, norm_forward_op, spec_args
from hf_rmsnorm.reference import reference_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(True, 1e-5, has_bias=True, functional=True)


def random(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


GATED = NormSpec(False, 1e-6, rounding="before_weight", gate="silu_before")
GEMMA = NormSpec(False, 1e-6, weight_offset=1.0)
PLAIN = NormSpec(False, 1e-6, has_weight=False)
ROWS = random(2, 5, 64)
WEIGHT = random(64)
BIAS = random(64)
HEADS = random(5, 64)
GATE = random(2, 5, 64)


def forward(spec, x, weight=None, bias=None, gate=None, statistics=True):
    """The operator's name and arguments."""
    formula = spec_args(spec)
    return norm_forward_op, (x, weight, bias, gate, *formula, statistics)


def backward(spec, x, weight, bias=None, gate=None, need_x=True):
    operator, of_forward = forward(spec, x, weight, bias, gate)
    y, rstd, mean = operator(*of_forward)
    need = [need_x, True, bias is not None, gate is not None]
    read = ROWS, x, weight, bias, gate
    formula = spec_args(spec)
    return norm_backward_op, (*read, rstd, mean, *formula, need)


def calls_of_norms():
    strided = ROWS.transpose(0, 1)
    yield forward(LAYER_NORM, ROWS, WEIGHT, BIAS)
    yield forward(LLAMA, ROWS, WEIGHT, statistics=False)
    yield forward(GEMMA, strided, WEIGHT)
    yield forward(LLAMA, ROWS.bfloat16(), WEIGHT)
    yield forward(PLAIN, ROWS[:0])
    yield forward(GATED, ROWS, WEIGHT, gate=GATE)
    yield forward(LLAMA, ROWS, HEADS)
    yield backward(LAYER_NORM, ROWS, WEIGHT, BIAS)
    yield backward(GATED, ROWS, WEIGHT, gate=GATE.bfloat16())
    yield backward(LLAMA, ROWS, HEADS)
    strided = strided.contiguous().transpose(0, 1)
    yield backward(LLAMA, strided, WEIGHT, need_x=False)


@pytest.mark.full
def test_opcheck():
    for operator, args in calls_of_norms():
        torch.library.opcheck(operator, args)


def orders(t):
    """t in strides by which the kernels number its rows in other orders."""
    last = t.dim() - 1
    for order in permutations(range(last)):
        strided = torch.empty_permuted(t.shape, (*order, last), dtype=t.dtype)
        yield strided.copy_(t)


FORMULAS = {
    "llama": LLAMA,
    "layer norm": NormSpec(True, 1e-5, has_bias=True),
    "functional": LAYER_NORM,
    "gate": NormSpec(False, 1e-6, gate="silu_after"),
    "heads": LLAMA,
}


def by_operators(spec, dy, x, weight, bias, gate):
    """(y, rstd, mean, dx, dweight, dbias, dgate)."""
    formula = spec_args(spec)
    need = [True, True, bias is not None, gate is not None]
    read = x, weight, bias, gate
    y, *statistics = norm_forward_op(*read, *formula, True)
    gradients = norm_backward_op(dy, *read, *statistics, *formula, need)
    for gradient, needed in zip(gradients, need, strict=True):
        assert bool(gradient.numel()) == needed
    assert gradients[0].stride() == y.stride()
    return y, *statistics, *gradients


def by_formula(spec, dy, x, weight, bias, gate):
    """(y, and the gradients of what is there)."""
    leaves = []
    for t in (x, weight, bias, gate):
        if t is not None:
            leaves.append(t)
    for leaf in leaves:
        leaf.requires_grad_()
    y = reference_norm(x, weight, bias, spec, gate)
    gradients = torch.autograd.grad(y, leaves, dy)
    return y, *gradients


def assert_near(ours, theirs, rtol, atol):
    for a, b in zip(ours, theirs, strict=True):
        a = a.flatten()
        b = b.flatten()
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


# no kernel serves float64
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(6, 4, 16), (2, 3, 4, 16)])
def test_statistics_are_those_of_each_row_whatever_the_order_of_rows(
    name, shape, dtype
):
    """Whoever splits x, and whoever takes the backward by itself, finds the row's
    statistics at the row's place.
    """
    spec = FORMULAS[name]
    x = random(*shape).to(dtype)
    dy = random(*shape, seed=4).to(dtype)
    shape_of_weight = [16]
    if name == "heads":
        shape_of_weight = [4, 16]
    weight = random(*shape_of_weight, seed=5)
    bias = None
    if spec.has_bias:
        bias = random(16, seed=6).to(dtype)
    gate = None
    if spec.gate:
        gate = random(*shape, seed=7).to(dtype)
    others = weight.to(dtype), bias, gate

    first = by_operators(spec, dy, x, *others)

    y, rstd, mean, *gradients = first
    assert rstd.shape == shape[:-1]
    if spec.centered:
        assert mean.shape == shape[:-1]
    for strided in orders(x):
        made = by_operators(spec, dy, strided, *others)
        layout = strided
        if spec.functional:
            layout = x
        assert made[0].stride() == layout.stride()
        assert_near(made, first, 1e-5, 1e-6)
    results = [y]
    for gradient in gradients:
        if gradient.numel():
            results.append(gradient)
    expected = by_formula(spec, dy, x, *others)
    assert_near(results, expected, 1e-4, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", ["before_weight", "weight_dtype", "once"])
def test_what_the_reference_serves_has_the_dtype_of_eager(
    rounding, weight_dtype, dtype
):
    spec = NormSpec(False, 1e-6, rounding=rounding)
    columns = 2 * 16_400  # too many for the kernels
    x = random(3, columns).to(dtype)
    weight = random(columns).to(weight_dtype)
    operator, arguments = forward(spec, x, weight)
    y, *_ = operator(*arguments)
    expected = reference_norm(x, weight, None, spec)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)


def test_formulas_that_no_arguments_tell_are_refused():
    with pytest.raises(TypeError, match="the operators do not take"):
        spec_args(NormSpec(False, 1e-6, group_size=8))


class Logged(torch.Tensor):
    """A wrapper that writes down what is called on it."""

    seen = []

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        args = tree_map_only(Logged, lambda logged: logged.inner, args)
        return func(*args, **(kwargs or {}))


def test_tensor_subclasses_go_through_the_registered_operator(monkeypatch):
    monkeypatch.setattr(Logged, "seen", [])
    with use_backend("triton"), torch.no_grad():
        got = compute_norm(Logged(ROWS), WEIGHT, None, LLAMA)
        assert Logged.seen == ["hf_rmsnorm.norm_forward.default"]
        assert torch.equal(got, compute_norm(ROWS, WEIGHT, None, LLAMA))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_norm_in_groups_compiles_to_one_graph(backend):
    spec = NormSpec(False, 1e-6, group_size=16)

    def norm(t):
        return compute_norm(t, WEIGHT, None, spec)

    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    with use_backend(backend):
        assert torch.equal(compiled(ROWS), norm(ROWS))
