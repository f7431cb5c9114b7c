"""Quantised weights in a float64 run: never read by arithmetic that does not know what
their codes mean.
"""

import pytest
import tiny_models
import torch
from torch import nn

from hf_rmsnorm import use_backend, verify_equivalence
from hf_rmsnorm.verification.float64 import in_float64

IDS = tiny_models.token_ids(2, 8)
SHIFTS = 4 * torch.arange(8, dtype=torch.int32)


class Packed(nn.Module):
    """As GPTQ's: eight values of four bits in an int32, and a forward that knows its
    own dtype alone.
    """

    def __init__(self, linear):
        super().__init__()
        largest = linear.weight.abs().amax(1, keepdim=True)
        scales = largest / 7
        codes = (linear.weight / scales).round() + 8
        codes = codes.to(torch.int32)
        codes = codes.unflatten(1, (-1, 8))
        packed = codes << SHIFTS
        packed = packed.sum(-1, dtype=torch.int32)
        self.register_buffer("qweight", packed)
        self.register_buffer("scales", scales)
        self.act = nn.Identity()

    def unpacked(self):
        codes = self.qweight[..., None] >> SHIFTS
        codes = codes & 15
        codes = codes.flatten(1) - 8
        return codes.to(self.scales.dtype) * self.scales

    def forward(self, x):
        weight = self.unpacked()
        y = x.to(weight.dtype) @ weight.T
        if x.dtype == self.scales.dtype:
            return y
        # memory that no kernel writes
        return torch.full_like(y, float("nan"), dtype=x.dtype)


@torch.library.custom_op("hf_rmsnorm_tests::unpack", mutates_args=())
def unpack(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype != torch.float32:
        raise RuntimeError(f"scale must be float32, got {scale.dtype}")
    return codes * scale


class ReadsCodes(nn.Module):
    """Reads the codes of a child outside of it, by an operator that has no float64, as
    DoRA does.
    """

    def __init__(self, linear):
        super().__init__()
        self.base = nn.Module()
        weight = linear.weight.float()
        largest = weight.abs().amax(1, keepdim=True)
        scale = largest / 127
        codes = (weight / scale).round()
        codes = codes.to(torch.int8)
        self.base.register_buffer("weight", codes)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        weight = unpack(self.base.weight, self.scale)
        weight = weight.to(x.dtype)
        return x @ weight.T


def replaced(make):
    model = tiny_models.build("llama", torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj = make(layer.mlp.down_proj)
    return model


@pytest.mark.parametrize("make", [Packed, ReadsCodes])
def test_a_model_with_codes_for_weights_is_verified(make):
    model = replaced(make)
    with use_backend("reference"):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    assert report.passed
    assert 0 < report.noise_floor.reference_max < 0.1
    name = make.__name__
    if make is ReadsCodes:
        name = "Module"
    assert report.quantised == {name: 2}


def test_the_float64_run_is_that_of_the_unpacked_weights():
    model = replaced(Packed)
    plain = tiny_models.build("llama", torch.bfloat16)
    for i, layer in enumerate(model.model.layers):
        packed = layer.mlp.down_proj
        linear = plain.model.layers[i].mlp.down_proj
        linear.weight.data = packed.unpacked()
    with in_float64(model):
        a = model(IDS).logits
    with in_float64(plain):
        b = plain(IDS).logits
    assert a.dtype == torch.float64
    difference = (a - b).abs().max()
    assert 0 < difference < 0.01
    assert "forward" not in vars(packed)


def test_a_small_mask_beside_plain_weights_changes_nothing():
    """Old models of users' own code keep their causal mask as uint8 in the attention."""
    model = tiny_models.build("llama")
    attention = model.model.layers[0].self_attn
    mask = torch.ones(8, 8, dtype=torch.uint8)
    attention.register_buffer("bias", mask.tril())
    with use_backend("reference"):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=0)
    assert report.passed
    assert not report.quantised
    assert "quantised" not in str(report)
