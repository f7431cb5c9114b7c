"""The second call on operands like those of a first finds its launch: what must be
noticed all the same.
"""

import re

import pytest
import torch
from add_norm import fused_add_norm
from heads import fused_qk_norm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, rms_norm, use_backend
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops.backend import device_refusal

pytestmark = pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
HIDDEN = 48


def patched(norm):
    """(a patched copy, the original) of a norm; calls of the copy on (2, 3, HIDDEN)
    rows have been planned.
    """
    holder = nn.Sequential(norm)
    original = type(norm).forward
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    patch_model(holder)
    assert launches(norm, rows()) == 1
    assert launches(norm, rows().requires_grad_()) == 1
    return norm, lambda x: original(norm, x)


def rows(dtype=torch.float32):
    return torch.randn(2, 3, HIDDEN, dtype=dtype)


def launches(norm, x):
    with count_launches() as counted:
        norm(x)
    return counted.total()


def test_another_backend_is_honoured():
    norm, _ = patched(LlamaRMSNorm(HIDDEN))
    for name, count in (("reference", 0), ("auto", 1), ("triton", 1)):
        with use_backend(name):
            assert launches(norm, rows()) == count, name


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: setattr(
            norm, "weight", nn.Parameter(torch.rand(HIDDEN).bfloat16())
        ),
        lambda norm: setattr(norm, "weight", nn.Parameter(torch.rand(HIDDEN, 2)[:, 0])),
        lambda norm: setattr(norm.weight, "data", torch.rand(HIDDEN).bfloat16()),
        lambda norm: setattr(norm.weight, "data", torch.rand(HIDDEN, 2)[:, 1]),
        lambda norm: setattr(norm, "variance_epsilon", 0.5),
        lambda norm: norm.double(),
    ],
    ids=["bfloat16", "strided", "data in bfloat16", "data strided", "eps", "float64"],
)
def test_a_changed_weight_or_eps_is_honoured(change):
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    change(norm)
    x = rows()
    torch.testing.assert_close(norm(x), original(x), rtol=1e-5, atol=1e-6)
    assert norm(x).dtype == original(x).dtype


def test_a_weight_of_another_shape_fails_as_the_original():
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    norm.weight = nn.Parameter(torch.ones(HIDDEN + 1))
    with pytest.raises(RuntimeError) as error:
        original(rows())
    with pytest.raises(RuntimeError, match=re.escape(str(error.value))):
        norm(rows())


def in_columns(t):
    """t in other strides, the last one 2."""
    return torch.stack([t, t], -1)[..., 0]


def in_rows(t):
    return t.clone(memory_format=torch.contiguous_format)


def gradients(compute, inputs, unpack):
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            outputs = compute(*inputs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        dys = []
        for y in outputs:
            values = torch.arange(y.numel()) / y.numel()
            dys.append(values.view_as(y).to(y.dtype))
        leaves = [t for t in inputs if t.requires_grad]
        made = torch.autograd.grad(outputs, leaves, dys)
    return made


@pytest.mark.parametrize("case", ["norm", "sum", "queries and keys"])
def test_saved_tensors_that_come_back_in_other_strides(case):
    x, residual = (
        torch.randn(3, 2, HIDDEN).transpose(0, 1).requires_grad_() for _ in range(2)
    )
    q = torch.randn(2, 5, 4, 16).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 5, 2, 16).transpose(1, 2).requires_grad_()
    weight = torch.rand(HIDDEN).requires_grad_()
    short = torch.rand(16).requires_grad_()
    tables = torch.randn(1, 5, 16), torch.randn(1, 5, 16)
    spec = NormSpec(centered=False, eps=1e-6, rounding="before_weight")
    compute, inputs = {
        "norm": (rms_norm, (x, weight)),
        "sum": (
            lambda x, r, w: fused_add_norm(x, r, w, None, spec),
            (x, residual, weight),
        ),
        "queries and keys": (
            lambda q, k, w: fused_qk_norm(q, k, w, w, spec, *tables),
            (q, k, short),
        ),
    }[case]
    expected = gradients(compute, inputs, lambda t: t)
    with use_backend("reference"):
        plain = gradients(compute, inputs, lambda t: t)
    for ours, theirs in zip(expected, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for unpack in (in_rows, in_columns):
        made = gradients(compute, inputs, unpack)
        for ours, theirs in zip(made, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_transforms_and_modes_see_operators():
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    x = rows()
    assert torch.equal(torch.vmap(norm)(x), torch.vmap(original)(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(norm(dual)).tangent is not None

    class Names(TorchDispatchMode):
        seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func)
            return func(*args, **(kwargs or {}))

    with Names():
        norm(x)
    assert launches(norm, x) == 1


def test_what_functorch_leaves_behind_is_unwrapped():
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    left = []
    torch.func.grad(lambda x: (left.append(x * 1), x.sum())[1])(rows())
    torch.testing.assert_close(norm(left[0]), original(left[0]), rtol=1e-6, atol=1e-6)


def test_a_forward_that_is_given_other_code_runs_it():
    def forward(self, x):
        return self.weight * x

    class Reloaded(LlamaRMSNorm):
        def forward(self, x):
            dtype = x.dtype
            x = x.float()
            return self.weight * (
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            ).to(dtype)

    norm, _ = patched(Reloaded(HIDDEN))
    Reloaded.forward.__code__ = forward.__code__
    x = rows()
    assert torch.equal(norm(x), norm.weight * x)
    assert launches(norm, x) == 0
