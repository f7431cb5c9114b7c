"""Modules that are nearly norms, or only called so: left alone, and named if they
normalise or carry a norm's name.
"""

import copy

import pytest
import torch
from reports import reason_for, report_on
from torch import nn

from hf_rmsnorm import use_backend


def rms(h, eps=1e-6):
    square = h.pow(2).mean(-1, keepdim=True)
    return h * torch.rsqrt(square + eps)


def divide_by_variance(self, x):
    variance = x.var(-1, keepdim=True, unbiased=False)
    return self.weight * x / (variance + 1e-6)


def affine(self, x):
    return self.weight * x + self.bias


def over_dim_1(self, x):
    square = x.pow(2).mean(1, keepdim=True)
    y = x * torch.rsqrt(square + 1e-6)
    return self.weight * y


def unbiased(self, x):
    h = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)
    return self.weight * h * rstd + self.bias


def no_upcast(self, x):
    return self.weight * rms(x)


def only_for_three_dimensions(self, x):
    eps = 1e-3
    if x.dim() == 3:
        eps = 1e-6
    y = rms(x.float(), eps)
    return self.weight * y.to(x.dtype)


def only_in_float32(self, x):
    if x.dtype != torch.float32:
        raise TypeError("needs float32")
    return self.weight * rms(x)


def two_inputs(self, x, residual):
    return self.weight * rms(x + residual)


def lookalike(forward, name):
    def __init__(self, size=32):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.rand(size))
        self.bias = nn.Parameter(torch.rand(size))
        self.multiplier = 0.75

    cls = type(name, (nn.Module,), {"__init__": __init__, "forward": forward})
    return cls()


UNKNOWN = "its formula is not one that this package knows"
NORMALISE = {
    unbiased: UNKNOWN,
    only_for_three_dimensions: "dimensional input",
}
DO_NOT = {
    divide_by_variance: "does not normalise over the last dimension",
    affine: "does not normalise over the last dimension",
    over_dim_1: "does not normalise over the last dimension",
    two_inputs: "does not normalise over the last dimension",
}


@pytest.mark.parametrize(("forward", "why"), [*NORMALISE.items(), *DO_NOT.items()])
def test_lookalike_with_a_norms_name_is_left_alone_and_named(forward, why):
    module = lookalike(forward, "OddRMSNorm")
    assert why in reason_for(module)
    assert type(module).forward is forward


@pytest.mark.parametrize(("forward", "why"), NORMALISE.items())
def test_lookalike_that_normalises_is_named_whatever_it_is_called(forward, why):
    assert why in reason_for(lookalike(forward, "Thing"))


@pytest.mark.parametrize("forward", DO_NOT)
def test_what_does_not_normalise_is_not_mentioned(forward):
    report = report_on(lookalike(forward, "Thing"))
    assert not report.swapped
    assert not report.skipped


FLOAT32 = "float32 only"


def test_what_is_exact_in_float32_only_is_served_there():
    module = lookalike(no_upcast, "Thing")
    original = copy.deepcopy(module)
    (record,) = report_on(module).swapped
    assert str(record.formula) == "RMSNorm(eps=1e-06, one rounding)"
    assert FLOAT32 in record.notes
    with use_backend("reference"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(2, 3, 32).to(dtype)
            module.to(dtype)
            original.to(dtype)
            assert torch.equal(module(x), original(x))
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(module(x), original(x))


def test_what_fails_in_half_precision_is_served_in_float32_and_fails_there():
    module = lookalike(only_in_float32, "Thing")
    original = copy.deepcopy(module)
    (record,) = report_on(module).swapped
    assert FLOAT32 in record.notes
    x = torch.randn(2, 3, 32)
    with use_backend("reference"):
        assert torch.equal(module(x), original(x))
        with pytest.raises(TypeError, match="needs float32"):
            module(x.bfloat16())
