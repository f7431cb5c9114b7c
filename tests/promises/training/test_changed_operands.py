"""A tensor replaced through `.data` between forward and backward raises, as in eager;
nothing is read past its end.

Offloading by hand does it, and so does a ZeRO-3 whose weights are not gathered for the
backward.
"""

import re

import pytest
import torch
from add_norm import fused_add_norm
from heads import fused_qk_norm
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import NormSpec, patch_model, rms_norm, use_backend

ROWS, SIZE = (6, 64), 64
HEADS = 1, 2, 3, SIZE
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")


def tensors(*shapes):
    """Results of an operator, as activations are."""
    torch.manual_seed(0)
    return [torch.randn(shape).requires_grad_() * 1 for shape in shapes]


def norm(module=None):
    module = module or LlamaRMSNorm(SIZE)
    patch_model(module, strict=True)
    (x,) = tensors(ROWS)
    operands = dict(module.named_parameters())
    operands["x"] = x
    return operands, module(x)


def layer_norm():
    return norm(nn.LayerNorm(SIZE))


def residual_sum():
    x, residual, weight = tensors(ROWS, ROWS, SIZE)
    h, y = fused_add_norm(x, residual, weight, None, LLAMA)
    return {"x": x, "residual": residual, "weight": weight}, h + y


def queries_and_keys():
    q, k, q_weight, k_weight = tensors(HEADS, HEADS, SIZE, SIZE)
    cos, sin = torch.rand(2, 1, 3, SIZE)
    yq, yk = fused_qk_norm(q, k, q_weight, k_weight, LLAMA, cos, sin)
    return {"q": q, "k": k, "the weight of k": k_weight, "cos": cos}, yq + yk


def compiled():
    x, weight = tensors(ROWS, SIZE)
    function = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    return {"x": x, "weight": weight}, function(x, weight)


def empty(t):
    return t.new_empty(0)


def short(t):
    return t[..., :1, :].clone()


def step(kind, name="", change=None):
    """The gradients of all operands, where one is replaced between forward and
    backward.
    """
    with use_backend("triton"):
        operands, y = kind()
        leaves = [t for t in operands.values() if t.requires_grad]
        if change is not None:
            changed = operands[name]
            changed.data = change(changed.detach())
        loss = y.float().square().sum()
        return torch.autograd.grad(loss, leaves)


CHANGED = [
    (norm, "x", short),
    (layer_norm, "bias", empty),
    (compiled, "weight", empty),
    (residual_sum, "weight", empty),
    (queries_and_keys, "the weight of k", empty),
    (queries_and_keys, "cos", short),
]


@pytest.mark.parametrize(("kind", "name", "change"), CHANGED)
def test_an_operand_of_another_shape_is_named(kind, name, change):
    step(kind)  # whose launch is kept
    with pytest.raises(RuntimeError) as error:
        step(kind, name, change)
    message = (
        rf"{name} changed between forward and backward: the backward expects shape "
        r"\(.*\) on cpu, and finds \(.*\) on cpu; keep what a forward has read .*"
    )
    assert re.fullmatch(message, str(error.value))
    step(kind)  # nor is the call after it any other
