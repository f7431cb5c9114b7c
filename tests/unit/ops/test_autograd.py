"""Gradients of what asks for one, alone or together, in whatever strides they come."""

import itertools

import pytest
import torch

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops import compute_norm
from hf_rmsnorm.reference import reference_norm

D = 8
GATED = NormSpec(False, 1e-3, has_bias=True, gate="silu_after")


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, operands, asked, dy):
    leaves = []
    for t, wanted in zip(operands, asked, strict=True):
        leaves.append(t.detach().requires_grad_(wanted))
    y = function(*leaves)
    assert y.requires_grad
    wanted = [t for t in leaves if t.requires_grad]
    return torch.autograd.grad(y, wanted, dy, allow_unused=True)


def compare(ours, theirs):
    for got, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


ASKED = list(itertools.product((True, False), repeat=4))
ASKED.remove((False, False, False, False))


@pytest.mark.parametrize("asked", ASKED)
def test_operands_of_a_norm(asked):
    x = rows(2, 3, D)
    weight = rows(D) + 2.0
    bias = rows(D, seed=1)
    gate = rows(2, 3, D, seed=2)
    dy = rows(2, 3, D, seed=3)

    def fused(x, weight, bias, gate):
        return compute_norm(x, weight, bias, GATED, gate=gate)

    def reference(x, weight, bias, gate):
        return reference_norm(x, weight, bias, GATED, gate=gate)

    operands = x, weight, bias, gate
    ours = gradients(fused, operands, asked, dy)
    theirs = gradients(reference, operands, asked, dy)
    compare(ours, theirs)
