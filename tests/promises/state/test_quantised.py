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

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What a float32 norm makes of a bfloat16 input.
FAMILIES = {"llama": torch.float32, "gemma2": torch.bfloat16, "olmo2": torch.bfloat16}
ids = tiny_models.token_ids().to(DEVICE)


class Int8Linear(nn.Module):
    """As bitsandbytes' Linear8bitLt: int8 rows with a scale each, computed in half
    precision, returned in x's dtype.
    """

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True).float() / 127
        self.register_buffer(
            "weight", (linear.weight.float() / scale).round().to(torch.int8)
        )
        self.register_buffer("scale", scale)

    def forward(self, x):
        return nn.functional.linear(
            x.bfloat16(), (self.weight * self.scale).bfloat16()
        ).to(x.dtype)


def quantised(family):
    """A bfloat16 model with its linears replaced and its norms in float32."""
    model = tiny_models.build(family, torch.bfloat16).to(DEVICE)
    replaced = 0
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            parent, _, name = path.rpartition(".")
            with torch.no_grad():
                setattr(model.get_submodule(parent), name, Int8Linear(module))
            replaced += 1
    assert replaced == 15
    for _, norm in tiny_models.norms(model):
        norm.float()
    return model


def flow(model):
    """The logits, and for every module that was called: path, dtype in, dtype out."""
    seen, handles = [], []

    def record(path):
        def hook(module, args, output):
            tensors = [t for t in (*args, output) if isinstance(t, torch.Tensor)]
            seen.append((path, *(t.dtype for t in tensors)))

        return hook

    for path, module in model.named_modules():
        handles.append(module.register_forward_hook(record(path)))
    output = model(ids).logits
    for handle in handles:
        handle.remove()
    return output, seen


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_dtypes_are_those_of_the_unpatched_model(family, fused_calls):
    model = quantised(family)
    expected, dtypes = flow(model)
    norm = next(path for path, _ in tiny_models.norms(model))
    assert next(found for path, *found in dtypes if path == norm) == [
        torch.bfloat16,
        FAMILIES[family],
    ]
    report = patch_model(model, strict=True)
    assert len(report.swapped) == len(tiny_models.norms(model))
    with use_backend("reference"):
        logits, now = flow(model)
    assert now == dtypes
    assert logits.dtype == expected.dtype and torch.equal(logits, expected)
    assert len(fused_calls) == len(report.swapped)
    assert all(
        norm.weight.dtype == torch.float32 for _, norm in tiny_models.norms(model)
    )
    with use_backend("triton"), count_launches() as launches:
        logits, now = flow(model)
    assert now == dtypes and launches["norm_forward"] == len(report.swapped)
    unpatch_model(model)
    assert torch.equal(model(ids).logits, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["patch first", "quantised first"])
@pytest.mark.parametrize("family", FAMILIES)
def test_torchao_int8_weight_only(family, order, fused_calls):
    pytest.importorskip(
        "torchao", reason="int8 weight-only quantisation comes with torchao"
    )
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    plain, model = (
        tiny_models.build(family, torch.bfloat16).to(DEVICE) for _ in range(2)
    )
    if order == "patch first":
        patch_model(model, strict=True)
    for m in (plain, model):
        quantize_(m, Int8WeightOnlyConfig())
        for _, norm in tiny_models.norms(m):
            norm.float()
    if order == "quantised first":
        patch_model(model, strict=True)
    assert type(model.model.layers[0].mlp.down_proj.weight) not in (
        nn.Parameter,
        torch.Tensor,
    )
    outputs = [flow(plain)]
    with use_backend("reference"):
        outputs.append(flow(model))
    assert torch.equal(outputs[1][0], outputs[0][0]) and outputs[1][1] == outputs[0][1]
    assert len(fused_calls) == len(tiny_models.norms(model))
    report = verify_equivalence(
        model, inputs=ids, max_new_tokens=2, backend="reference"
    )
    assert report.passed and report.quantised == {"Linear": 15}
