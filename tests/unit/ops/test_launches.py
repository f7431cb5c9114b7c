"""The second call on operands like those of a first finds its launch: what must be
noticed all the same.
"""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, rms_norm
from hf_rmsnorm.operands import GradientOperands, HeadOperands, NormOperands
from hf_rmsnorm.ops import norm_kinds, qk_kinds
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.ops.kinds import Kind

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


def in_rows(t):
    return t.clone(memory_format=torch.contiguous_format)


def unchanged(t):
    return t


def test_an_expanded_input_that_comes_back_in_rows():
    """As the latents of a resampler do under activation offloading: in plain torch."""
    latents = torch.randn(4, HIDDEN, requires_grad=True)
    weight = torch.rand(HIDDEN)
    dy = torch.randn(3, 4, HIDDEN)
    gradients = []
    for unpack in (unchanged, in_rows, in_rows):
        with torch.autograd.graph.saved_tensors_hooks(unchanged, unpack):
            y = rms_norm(latents.expand(3, 4, HIDDEN), weight)
        gradients += torch.autograd.grad(y, latents, dy)
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
def test_what_functorch_leaves_behind_is_computed_by_operators(transform):
    """It has no memory."""
    norm, original = patched(LlamaRMSNorm(HIDDEN))
    left = []

    def total(x):
        left.append(x * 1)
        return x.sum()

    transform(total)(rows())
    torch.testing.assert_close(norm(*left), original(*left), rtol=1e-6, atol=1e-6)


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


def test_no_two_kinds_have_the_same_number_of_fields_and_of_operands():
    heads = len(HeadOperands._fields)
    operands = {
        norm_kinds.NormForwardKind: len(NormOperands._fields),
        norm_kinds.NormBackwardKind: len(GradientOperands._fields),
        qk_kinds.HeadsForwardKind: heads,
        qk_kinds.HeadsBackwardKind: 2 + heads + 1,
        qk_kinds.RotaryBackwardKind: heads,
    }
    assert operands.keys() == set(Kind.__subclasses__())
    numbers = {(len(kind._fields), count) for kind, count in operands.items()}
    assert len(numbers) == len(operands)
