"""A tensor replaced through `.data` between forward and backward raises, as in eager;
nothing is read past its end.

Offloading by hand does it, and so does a ZeRO-3 whose weights are not gathered for the
backward.
"""

import pytest
import torch
from add_norm import fused_add_norm
from heads import fused_qk_norm
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import NormSpec, patch_model, use_backend
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.ops.modulated import modulated_norm

ROWS, SIZE, HEADS, LENGTH = 6, 64, 2, 3
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
GATED = NormSpec(False, 1e-6, gate="silu_after")
LAYER = NormSpec(True, 1e-6, has_bias=True, functional=True)


def some(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(*shapes):
    """Results of an operator, as activations are; each of another seed."""
    return [some(*s, seed=i).requires_grad_() * 1 for i, s in enumerate(shapes)]


def norm(module=None):
    module = module or LlamaRMSNorm(SIZE)
    patch_model(module, strict=True)
    (x,) = tensors((ROWS, SIZE))
    return {"x": x, **dict(module.named_parameters())}, module(x)


def layer_norm():
    return norm(nn.LayerNorm(SIZE))


def gate():
    x, gate, weight = tensors((ROWS, SIZE), (ROWS, SIZE), (SIZE,))
    y = fused_norm(x, weight, None, GATED, gate=gate)
    return {"x": x, "gate": gate, "weight": weight}, y


def residual_sum():
    x, residual, weight = tensors((ROWS, SIZE), (ROWS, SIZE), (SIZE,))
    h, y = fused_add_norm(x, residual, weight, None, LLAMA)
    return {"x": x, "residual": residual, "weight": weight}, h + y


def queries_and_keys():
    heads = 1, HEADS, LENGTH, SIZE
    q, k, q_weight, k_weight = tensors(heads, heads, (SIZE,), (SIZE,))
    cos, sin = some(1, LENGTH, SIZE, seed=8), some(1, LENGTH, SIZE, seed=9)
    yq, yk = fused_qk_norm(q, k, q_weight, k_weight, LLAMA, cos, sin)
    return {"q": q, "k": k, "k_weight": k_weight, "cos": cos}, yq + yk


def modulation():
    x, residual = tensors((ROWS, SIZE), (ROWS, SIZE))
    factor, weight, bias, scale, shift = tensors(*[(SIZE,)] * 5)
    h, y = modulated_norm(LAYER, (x, weight, bias, scale, shift, factor, residual))
    return {"x": x, "factor": factor, "shift": shift}, h + y


def compiled():
    x, weight = tensors((ROWS, SIZE), (SIZE,))
    function = torch.compile(
        lambda x, w: fused_norm(x, w, None, LLAMA), backend="aot_eager", fullgraph=True
    )
    return {"x": x, "weight": weight}, function(x, weight)


def empty(t):
    return t.new_empty(0)


def short(t):
    return t[..., :1, :].clone() if t.dim() > 1 else t[:1].clone()


def apart(t):
    """The same values, with gaps between them."""
    return torch.stack((t, t), dim=-1)[..., 0]


def turned(t):
    """The same values, column by column."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def step(kind, name="", change=None):
    """The gradients of all operands, where one is replaced between forward and
    backward.
    """
    with use_backend("triton"):
        operands, y = kind()
        leaves = [t for t in operands.values() if t is not None and t.requires_grad]
        if change is not None:
            operands[name].data = change(operands[name].detach())
        return torch.autograd.grad(y.float().square().sum(), leaves)


CHANGED = [
    (norm, "x", short),
    (layer_norm, "bias", empty),
    (compiled, "weight", empty),
    (residual_sum, "weight", empty),
    (queries_and_keys, "q", short),
    (queries_and_keys, "k_weight", empty),
    (queries_and_keys, "cos", short),
]
WORDS = {"k_weight": "the weight of k"}


def named(case):
    return getattr(case, "__name__", case)


@pytest.mark.parametrize(("kind", "name", "change"), CHANGED, ids=named)
def test_an_operand_of_another_shape_is_named(kind, name, change):
    step(kind)  # whose launch is kept
    with pytest.raises(
        RuntimeError,
        match=f"^{WORDS.get(name, name)} changed between forward and backward",
    ) as error:
        step(kind, name, change)
    assert "\n" not in str(error.value)
    step(kind)  # nor is the call after it any other


def test_the_error_says_what_was_expected_and_what_is_there():
    with pytest.raises(RuntimeError) as error:
        step(norm, "x", short)
    assert str(error.value) == (
        "x changed between forward and backward: the backward expects shape (6, 64) on cpu, and finds (1, 64) on cpu; "
        "keep what a forward has read as it is until its backward has run"
    )


OTHER_STRIDES = [
    (norm, "x", turned),
    (gate, "gate", turned),
    (queries_and_keys, "cos", turned),
    (compiled, "x", turned),
]


@pytest.mark.parametrize(("kind", "name", "change"), OTHER_STRIDES, ids=named)
def test_the_same_values_with_other_strides_give_the_same_gradients(kind, name, change):
    for _ in range(2):
        for ours, usual in zip(step(kind, name, change), step(kind), strict=True):
            torch.testing.assert_close(ours, usual)


@pytest.mark.parametrize(
    ("kind", "name"), [(residual_sum, "residual"), (modulation, "shift")], ids=named
)
def test_what_no_backward_reads_may_go(kind, name):
    for ours, usual in zip(step(kind, name, empty), step(kind), strict=True):
        assert torch.equal(ours, usual)
