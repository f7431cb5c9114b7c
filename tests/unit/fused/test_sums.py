"""A sum and the norm behind it: which operands are computed together."""

import pytest
import torch
from remote_norms import SIZE, MptLPLayerNorm
from torch import nn

from hf_rmsnorm import patch_model
from hf_rmsnorm.fused.sums import add_and_norm

D = 16


@pytest.fixture
def norm():
    norm = nn.RMSNorm(D, eps=1e-6)
    patch_model(norm)
    return norm


@pytest.fixture
def fused(fused_sums):
    """What adds and normalises, checks both results, and says whether that was one
    launch.
    """

    def run(norm, left, right):
        fused_sums.clear()
        total, y = add_and_norm(left, right, norm)
        torch.testing.assert_close(total, left + right, rtol=0, atol=0)
        torch.testing.assert_close(y, norm(left + right))
        assert type(total) is type(left + right)
        return bool(fused_sums)

    return run


def test_a_norm_that_casts_its_input_under_autocast_is_called_there(fused):
    norm = MptLPLayerNorm().requires_grad_(False)
    patch_model(norm)
    left, right = torch.randn(2, 2, SIZE)
    assert fused(norm, left, right)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused(norm, left, right)


class Tagged(torch.Tensor):
    """A subclass, of which nobody knows what it makes of a sum."""


@pytest.mark.parametrize("at", [0, 1])
def test_sums_of_anything_but_plain_tensors_are_torchs(norm, fused, at):
    for other in (torch.randn(2, D).as_subclass(Tagged), 2.0):
        operands = [
            torch.randn(2, D, requires_grad=True),
            torch.randn(2, D, requires_grad=True),
        ]
        operands[at] = other
        assert not fused(norm, *operands)


@pytest.mark.parametrize("which", ["left", "right", "weight", "none"])
def test_the_operand_alone_that_asks_for_it_has_its_gradient(norm, which):
    operands = {"left": torch.randn(2, D), "right": torch.randn(2, D)}
    norm.weight.requires_grad_(which == "weight")
    leaf = (operands | {"weight": norm.weight}).get(which)
    if leaf is not None:
        leaf.requires_grad_()
    left, right = operands.values()
    found = [add_and_norm(left, right, norm), (left + right, norm(left + right))]
    asking = [[t.requires_grad for t in pair] for pair in found]
    assert asking[0] == asking[1]
    if leaf is not None:
        ours, own = (torch.autograd.grad(y.square().sum(), leaf) for _, y in found)
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "left, right", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_the_wider_operand_decides_what_torchs_own_norm_takes(left, right, fused_sums):
    """The weights are float32, which torch's own norm takes of rows in float32 alone."""
    norm = nn.LayerNorm(D)
    patch_model(norm)
    with torch.no_grad():
        add_and_norm(torch.randn(2, D).to(left), torch.randn(2, D).to(right), norm)
    assert len(fused_sums) == 1
