"""Norms of model code outside of Transformers are swapped, and have its bits in every
regime of autocast: off, in bfloat16, in float16.
"""

from unittest.mock import patch

import pytest
import remote_norms
import torch
import torch.nn.functional as F
from reports import report_on
from torch import nn
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from hf_rmsnorm import count_launches, use_backend
from hf_rmsnorm.patching.formula.probe import OnDevice, autocast

# of the older functions of torch that such code calls
pytestmark = pytest.mark.filterwarnings("ignore:.*autocast.*deprecated")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
APART = "under autocast no sum is fused with it"
CLASSES = (*remote_norms.ALL, NemotronLayerNorm1P)
CAST_THEMSELVES = (*remote_norms.CAST_THEMSELVES, NemotronLayerNorm1P)


def made(cls):
    norm = cls(remote_norms.SIZE) if cls is NemotronLayerNorm1P else cls()
    torch.manual_seed(0)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm.requires_grad_(False)


def inputs_of(norm):
    """The norm in each dtype, as (x, dtype of autocast or None)."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, remote_norms.SIZE, generator=generator)
    for dtype in (FP32, BF16, FP16):
        norm.to(dtype)
        for regime in (None, BF16, FP16):
            yield rows.to(dtype), regime


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_norm_of_other_code_has_its_bits_and_a_kernel_in_every_regime(cls):
    norm = made(cls)
    (record,) = report_on(norm).swapped
    assert (APART in record.notes) == (cls in CAST_THEMSELVES)
    for x, regime in inputs_of(norm):
        with autocast("cpu", regime):
            expected = cls.forward(norm, x)
            with use_backend("reference"):
                y = norm(x)
            with count_launches() as launches:
                launched = norm(x)
        torch.testing.assert_close(y, expected, rtol=2e-7, atol=2e-7)
        assert launched.dtype == y.dtype and launches.total() == 1, (x.dtype, regime)


@pytest.mark.parametrize("cls", CAST_THEMSELVES, ids=lambda cls: cls.__name__)
def test_a_norm_that_casts_under_autocast_is_proven_as_a_gpu_runs_it(cls):
    norm = made(cls)
    assert report_on(norm).swapped
    for x, regime in inputs_of(norm):
        if regime is None:
            continue
        with OnDevice("cuda"), autocast("cuda", regime), use_backend("reference"):
            expected = cls.forward(norm, x)
            with patch.object(F, "layer_norm") as own:
                y = norm(x)
        # a float32 result of torch's own norm has other last bits than the formula's
        torch.testing.assert_close(y, expected, rtol=2e-7, atol=2e-7)
        assert not own.called


def test_autocast_of_another_device_counts_for_a_norm_that_asks_without_naming_one():
    norm = made(remote_norms.MptLPLayerNorm)
    assert report_on(norm).swapped
    x = torch.randn(6, remote_norms.SIZE)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert norm(x).dtype == torch.get_autocast_dtype("cpu")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert norm(x).dtype == FP32


def test_a_flag_that_its_forward_asks_for_and_is_set_later_is_obeyed():
    norm = made(remote_norms.TimmLayerNorm)
    assert report_on(norm).swapped
    norm._fast_norm = True
    x = torch.randn(6, remote_norms.SIZE)
    with torch.autocast("cpu", BF16):
        assert norm(x).dtype == BF16


class WeightInItsInputsDtype(remote_norms.InternLM2RMSNorm):
    def forward(self, x):
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type):
            weight = weight.to(x.dtype)
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return weight * y.to(x.dtype)


class LoweredInTwoDimensions(nn.LayerNorm):
    def __init__(self):
        super().__init__(remote_norms.SIZE)

    def forward(self, x):
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type) and x.dim() == 2:
            x = x.half()
            weight = weight.half()
        return F.layer_norm(x, self.normalized_shape, weight, None, self.eps)


@pytest.mark.parametrize("cls", [WeightInItsInputsDtype, LoweredInTwoDimensions])
def test_a_norm_that_casts_some_operands_or_some_inputs_is_left_alone_then(cls):
    norm = made(cls)
    (record,) = report_on(norm).swapped
    assert "under autocast it runs its own forward" in record.notes


def test_a_float64_operand_of_a_norm_that_casts_is_left_to_the_module():
    norm = made(remote_norms.TimmFastLayerNorm).double()
    x = torch.randn(6, remote_norms.SIZE, dtype=torch.float64)
    assert report_on(norm).swapped
    with autocast("cpu", BF16):
        assert torch.equal(norm(x), type(norm).__base__.forward(norm, x))
