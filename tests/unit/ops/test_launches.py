"""The second call on operands like those of a first finds its launch: what must be
noticed all the same.
"""

import re

import pytest
import torch
from add_norm import fused_add_norm
from heads import fused_qk_norm
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, rms_norm, use_backend
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops.backend import device_refusal

pytestmark = pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
HIDDEN = 48


def patched(norm, **options):
    """(a patched copy, the original) of a norm; calls of the copy on (2, 3, HIDDEN)
    rows have been planned.
    """
    holder = nn.Sequential(norm)
    original = type(norm).forward
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    patch_model(holder, **options)
    assert launches(norm, rows()) == 1
    assert launches(norm, rows().requires_grad_()) == 1
    return norm, lambda x: original(norm, x)


def rows(dtype=torch.float32):
    return torch.randn(2, 3, HIDDEN, dtype=dtype)


def launches(norm, x):
    with count_launches() as counted:
        norm(x)
    return counted.total()


def in_columns(t):
    """t in other strides, the last one 2."""
    return torch.stack([t, t], -1)[..., 0]


def test_a_weight_of_another_shape_fails_as_the_original():
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    norm.weight = nn.Parameter(torch.ones(HIDDEN + 1))
    with pytest.raises(RuntimeError) as error:
        original(rows())
    text = re.escape(str(error.value))
    with pytest.raises(RuntimeError, match=text):
        norm(rows())


def in_rows(t):
    return t.clone(memory_format=torch.contiguous_format)


def unchanged(t):
    return t


def gradients(compute, inputs, unpack=unchanged):
    """The gradients of a second call."""
    leaves = [t for t in inputs if t.requires_grad]
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(unchanged, unpack):
            outputs = compute(*inputs)
        dys = []
        for y in outputs:
            values = torch.arange(y.numel()) / y.numel()
            dys.append(values.view(y.shape))
        made = torch.autograd.grad(outputs, leaves, dys)
    return made


def of_rows(x, weight):
    return (rms_norm(x, weight),)


def of_sum(x, residual, weight):
    return fused_add_norm(x, residual, weight, None, SPEC)


def of_heads(q, k, weight, cos, sin):
    return fused_qk_norm(q, k, weight, weight, SPEC, cos, sin)


SPEC = NormSpec(centered=False, eps=1e-6, rounding="before_weight")
STREAM = (3, 2, HIDDEN)
CASES = {
    "norm": (of_rows, [STREAM], HIDDEN, []),
    "sum": (of_sum, [STREAM, STREAM], HIDDEN, []),
    "queries and keys": (
        of_heads,
        [(4, 2, 5, 16), (2, 2, 5, 16)],
        16,
        [(1, 5, 16)] * 2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_tensors_that_come_back_in_other_strides(case):
    compute, shapes, width, tables = CASES[case]
    inputs = []
    for shape in shapes:
        x = torch.randn(shape).transpose(0, 1)
        inputs.append(x.requires_grad_())
    inputs.append(torch.rand(width).requires_grad_())
    for shape in tables:
        inputs.append(torch.randn(shape))
    expected = gradients(compute, inputs)
    with use_backend("reference"):
        plain = gradients(compute, inputs)
    for ours, theirs in zip(expected, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for unpack in (in_rows, in_columns):
        made = gradients(compute, inputs, unpack)
        for ours, theirs in zip(made, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_expanded_input_that_comes_back_in_rows():
    """As the latents of a resampler do under activation offloading."""

    def of_latents(latents, weight):
        return of_rows(latents.expand(3, 4, HIDDEN), weight)

    inputs = torch.randn(4, HIDDEN).requires_grad_(), torch.rand(HIDDEN)
    expected = gradients(of_latents, inputs)
    made = gradients(of_latents, inputs, in_rows)
    with use_backend("reference"):
        plain = gradients(of_latents, inputs)
    assert torch.equal(made[0], expected[0])
    torch.testing.assert_close(made, plain, rtol=1e-4, atol=1e-5)


def left_behind(transform):
    left = []

    def total(x):
        left.append(x * 1)
        return x.sum()

    transform(total)(rows())
    return left[0]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
def test_what_functorch_leaves_behind_is_computed_by_operators(transform):
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    x = left_behind(transform)
    torch.testing.assert_close(norm(x), original(x), rtol=1e-6, atol=1e-6)


def test_an_input_made_in_inference_mode_trains_the_weight():
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    with torch.inference_mode():
        x = rows()
    found = [torch.autograd.grad(f(x).sum(), norm.weight) for f in (norm, original)]
    assert torch.equal(*[gradient for (gradient,) in found])


def test_a_forward_that_is_given_other_code_runs_it():
    def forward(self, x):
        return self.weight * x

    class Reloaded(LlamaRMSNorm):
        def forward(self, x):
            wide = x.float()
            variance = wide.pow(2).mean(-1, keepdim=True)
            y = wide * torch.rsqrt(variance + self.variance_epsilon)
            return self.weight * y.to(x.dtype)

    norm, _ = patched(Reloaded(HIDDEN))
    Reloaded.forward.__code__ = forward.__code__
    x = rows()
    assert torch.equal(norm(x), norm.weight * x)
    assert launches(norm, x) == 0
