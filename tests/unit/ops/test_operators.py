"""The registered operators: what torch itself checks of them, and that they serve what
the kernels do not.
"""

import pytest
import torch
from computed import compute_norm
from torch.utils._pytree import tree_map_only

from hf_rmsnorm import NormSpec, use_backend
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


FORMULAS = {
    "llama": LLAMA,
    "layer norm": NormSpec(True, 1e-5, has_bias=True),
    "gemma": GEMMA,
    "t5": NormSpec(False, 1e-6, rounding="weight_dtype"),
    "functional": LAYER_NORM,
    "gate": NormSpec(False, 1e-6, gate="silu_after"),
    "heads": LLAMA,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradcheck_in_float64(name):
    """Of rows as they lie in memory, and in another order."""
    spec = FORMULAS[name]
    weight = random(3, 16) if name == "heads" else random(16)
    bias = random(16, seed=4) if spec.has_bias else None
    gate = random(2, 3, 16, seed=5) if spec.gate else None

    def operator(x, *others):
        y, rstd, _ = norm_forward_op(x, *others, *spec_args(spec), True)
        assert rstd.shape == x.shape[:-1]
        return y

    for x in (random(2, 3, 16), random(3, 2, 16).transpose(0, 1)):
        leaves = []
        for t in (x, weight, bias, gate):
            leaves.append(t if t is None else t.double().requires_grad_())
        assert torch.autograd.gradcheck(operator, leaves)


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
