"""Which implementation serves a call: what no kernel computes is refused, never computed as something else."""

import pytest
import torch
from torch import nn

from hf_rmsnorm import NormSpec, patch_model, use_backend
from hf_rmsnorm.ops import fused_add_norm, fused_norm
from hf_rmsnorm.reference import reference_norm

WIDE = 16_392  # above it no program holds a row in its registers
WEIGHT_FIRST = NormSpec(False, 1e-6, weight_first=True)


class WeightFirst(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5)

    def forward(self, x):
        x = x * self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_a_weight_that_comes_first_in_wide_rows():
    x, residual, weight = torch.randn(2, WIDE), torch.randn(2, WIDE), torch.rand(WIDE) + 0.5
    assert torch.equal(fused_norm(x, weight, None, WEIGHT_FIRST), reference_norm(x, weight, None, WEIGHT_FIRST))
    _, y = fused_add_norm(x, residual, weight, None, WEIGHT_FIRST)
    assert torch.equal(y, reference_norm(residual + x, weight, None, WEIGHT_FIRST))
    with use_backend("triton"), pytest.raises(RuntimeError, match=f"weight_first.*{WIDE}"):
        fused_norm(x, weight, None, WEIGHT_FIRST)


def test_a_patched_module_whose_weight_becomes_wide():
    model = nn.Sequential(WeightFirst(64))
    assert patch_model(model).swapped[0].formula.weight_first
    model[0].weight = nn.Parameter(torch.rand(WIDE) + 0.5)
    x = torch.randn(2, WIDE)
    assert torch.equal(model(x), WeightFirst.forward(model[0], x))
