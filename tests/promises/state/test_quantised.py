"""Quantised models whose norms stay in float32: identical output, identical dtypes from
module to module.
"""

import pytest
import tiny_models
import torch
from torch import nn

from hf_rmsnorm import (
    count_launches,
    patch_model,
    unpatch_model,
    use_backend,
    verify_equivalence,
)

# What a float32 norm makes of a bfloat16 input.
FAMILIES = {"llama": torch.float32, "gemma2": torch.bfloat16, "olmo2": torch.bfloat16}
ids = tiny_models.token_ids()


class Int8Linear(nn.Module):
    """As bitsandbytes' Linear8bitLt: int8 rows with a scale each, computed in half
    precision, returned in x's dtype.
    """

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True).float() / 127
        codes = (linear.weight.float() / scale).round()
        self.register_buffer("weight", codes.to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x):
        weight = (self.weight * self.scale).bfloat16()
        return nn.functional.linear(x.bfloat16(), weight).to(x.dtype)


def by_hand(model):
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            with torch.no_grad():
                model.set_submodule(path, Int8Linear(module))


def by_torchao(model):
    quantization = pytest.importorskip(
        "torchao.quantization", reason="int8 weight-only comes with torchao"
    )
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


def flow(model):
    """The logits, and for every module that was called: path, dtype in, dtype out."""
    paths = {module: path for path, module in model.named_modules()}
    seen = []

    def note(module, args, output):
        tensors = [t for t in (*args, output) if isinstance(t, torch.Tensor)]
        seen.append((paths[module], *(t.dtype for t in tensors)))

    handles = [module.register_forward_hook(note) for module in paths]
    output = model(ids).logits
    for handle in handles:
        handle.remove()
    return output, seen


QUANTISERS = [by_hand, pytest.param(by_torchao, marks=pytest.mark.full)]


@pytest.mark.parametrize("quantise", QUANTISERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_dtypes_are_those_of_the_unpatched_model(
    family, quantise, fused_calls
):
    """Of a bfloat16 model with quantised linears, and its norms in float32."""
    model = tiny_models.build(family, torch.bfloat16)
    quantise(model)
    norms = tiny_models.norms(model)
    for _, norm in norms:
        norm.float()
    expected, dtypes = flow(model)
    path, _ = norms[0]
    assert (path, torch.bfloat16, FAMILIES[family]) in dtypes
    patch_model(model, strict=True)
    with use_backend("reference"):
        logits, now = flow(model)
    assert now == dtypes
    assert torch.equal(logits, expected)
    assert len(fused_calls) == len(norms)
    with use_backend("triton"), count_launches() as launches:
        _, now = flow(model)
    assert now == dtypes
    assert launches["norm_forward"] == len(norms)
    if quantise is by_torchao:
        with use_backend("reference"):
            report = verify_equivalence(model, inputs=ids, max_new_tokens=2)
        assert report.passed and report.quantised == {"Linear": 15}
    unpatch_model(model)
    assert torch.equal(model(ids).logits, expected)
