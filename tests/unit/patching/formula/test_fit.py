"""Each family of norms in Transformers by its live classes: recognised, bit-equal in
plain torch, as accurate fused.
"""

import copy
import importlib.util

import pytest
import torch
import transformers
from gpu import DEVICE
from tolerance import assert_as_accurate
from torch import nn

from hf_rmsnorm import patch_model, unpatch_model, use_backend


def live(model, name):
    """What makes a module of a live class; it skips the test where this Transformers
    does not have the model yet.
    """

    def make(*arguments, **keywords):
        if importlib.util.find_spec(f"transformers.models.{model}") is None:
            pytest.skip(f"Transformers {transformers.__version__} has no {model}")
        module = importlib.import_module(
            f"transformers.models.{model}.modeling_{model}"
        )
        return getattr(module, name)(*arguments, **keywords)

    return make


class Textbook(nn.Module):
    """weight * x / (RMS + eps) + bias, as it is taught."""

    def __init__(self, hidden_size, eps=1e-3):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h / (h.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        return self.weight * h.to(x.dtype) + self.bias


# class, arguments of its constructor, shape of the input, formula, whether a gate is
# given
FAMILIES = {
    "silu_before_in_groups": (
        live("mamba2", "MambaRMSNormGated"), (96, 24), (2, 5, 96),
        "groups of 24, silu(gate) before", True,
    ),
    "silu_after": (
        live("qwen3_next", "Qwen3NextRMSNormGated"), (96,), (40, 96),
        "silu(gate) after", True,
    ),
    "sigmoid_after": (
        live("kimi_linear", "KimiLinearRMSNormGated"), (96,), (2, 5, 3, 96),
        "sigmoid(gate) after", True,
    ),
    "a_flag_for_before": (
        live("falcon_h1", "FalconH1RMSNormGated"), (96, 1e-6, 4, False), (2, 5, 96),
        "groups of 24, silu(gate) before", True,
    ),
    "a_flag_for_after": (
        live("falcon_h1", "FalconH1RMSNormGated"), (96, 1e-6, 4, True), (2, 5, 96),
        "groups of 24, silu(gate) after", True,
    ),
    "groups": (
        live("qwen4_exp", "Qwen4ExpTextRMSNorm"), (96, 24), (2, 5, 96),
        "weight + 1, groups of 24", False,
    ),
    "a_weight_for_each_head": (
        live("cohere", "CohereLayerNorm"), ((3, 32),), (2, 5, 3, 32),
        "LayerNorm(eps=1e-05, one rounding)", False,
    ),
    "rounded_rstd": (
        live("deepseek_v4", "DeepseekV4UnweightedRMSNorm"), (), (2, 5, 96),
        "no weight, rounds rstd", False,
    ),
    "cast_back_then_affine": (
        live("deberta", "DebertaLayerNorm"), (96,), (2, 5, 96),
        "rounds before weight, bias", False,
    ),
    "textbook": (Textbook, (96,), (4, 96), "eps=0.001 outside the root", False),
}  # fmt: skip

OTHER_PRIMITIVES = ("cast_back_then_affine",)  # a division: other roundings of float32


def make(name, dtype=torch.float32):
    cls, arguments, shape, formula, gated = FAMILIES[name]
    torch.manual_seed(0)
    module = cls(*arguments)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.8, 0.3)
    module = module.to(DEVICE, dtype)
    tensors = []
    for _ in range(1 + gated):
        tensors.append((1.7 * torch.randn(shape) + 0.25).to(DEVICE, dtype))
    return module, tensors, formula


def run(module, tensors):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = module(*leaves)
    generator = torch.Generator().manual_seed(3)
    dy = torch.randn(y.shape, generator=generator).to(DEVICE, y.dtype)
    return [y, *torch.autograd.grad(y, [*leaves, *module.parameters()], dy)]


def in_float64(patched, tensors):
    """The formula of a patched module, which the first test below proves to be the
    module's own, in float64.
    """
    with use_backend("reference"):
        return run(copy.deepcopy(patched).double(), [t.double() for t in tensors])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_live_class_is_swapped_and_bit_equal(name, dtype, fused_calls):
    module, tensors, formula = make(name, dtype)
    expected = module(*tensors)
    (record,) = patch_model(module).swapped
    assert formula in str(record.formula)
    with use_backend("reference"):
        y = module(*tensors)
    assert len(fused_calls) == 1
    if name in OTHER_PRIMITIVES and dtype == torch.float32:
        assert_as_accurate(y, expected, in_float64(module, tensors)[0])
    else:
        assert torch.equal(y, expected)
    unpatch_model(module)
    assert torch.equal(module(*tensors), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_kernels_are_as_accurate_as_the_live_class(name, dtype):
    module, tensors, _ = make(name, dtype)
    eager = run(module, tensors)
    patch_model(module)
    with use_backend("triton"):
        fused = run(module, tensors)
    exact = in_float64(module, tensors)
    names = [
        "y",
        "dx",
        *(["dgate"] if len(tensors) > 1 else []),
        *(n for n, _ in module.named_parameters()),
    ]
    for what, ours, theirs, truth in zip(names, fused, eager, exact, strict=True):
        assert_as_accurate(ours, theirs, truth, what)
    assert fused[0].stride() == eager[0].stride()


def test_a_norm_over_dimension_1_is_left_alone():
    cls = live("convnext", "ConvNextLayerNorm")
    module = nn.Sequential(cls(24, data_format="channels_first"), cls(24))
    (record,) = patch_model(module).skipped
    assert record.path == "0"
    assert "so a kernel gains nothing here" in record.reason
