"""Modules that are nearly norms, or only called so: left alone, and named if they
normalise or carry a norm's name.
"""

import pytest
import torch
from reports import reason_for, report_on
from torch import nn

from hf_rmsnorm import use_backend


def rms(h, eps=1e-6):
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def divide_by_variance(self, x):
    return self.weight * x / (x.var(-1, keepdim=True, unbiased=False) + 1e-6)


def eps_outside(self, x):
    return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6))


def affine(self, x):
    return self.weight * x + self.bias


def over_dim_1(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


def unbiased(self, x):
    return (
        self.weight
        * (x - x.mean(-1, keepdim=True))
        * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)
        + self.bias
    )


def weight_first(self, x):
    return rms(x.float() * self.weight.float()).to(x.dtype)


def no_upcast(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def grouped(self, x):
    h = x.float().unflatten(-1, (2, -1))
    return self.weight * rms(h).flatten(-2).to(x.dtype)


def random_forward(self, x):
    noise = 0.0 * torch.rand_like(x)
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + noise)


def scaled_by_an_attribute(self, x):
    return self.multiplier * (self.weight * rms(x.float()).to(x.dtype))


def depends_on_rows(self, x):
    y = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))
    return y + y.flatten()[0]


def only_for_three_dimensions(self, x):
    return self.weight * rms(x.float(), 1e-6 if x.dim() == 3 else 1e-3).to(x.dtype)


def only_in_float32(self, x):
    if x.dtype != torch.float32:
        raise TypeError("needs float32")
    return self.weight * rms(x)


def returns_pair(self, x):
    return self.weight * rms(x), x


def two_inputs(self, x, residual):
    return self.weight * rms(x + residual)


def lookalike(forward, name):
    def __init__(self, size=32):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.rand(size))
        self.bias = nn.Parameter(torch.rand(size))
        self.multiplier = 0.75

    return type(name, (nn.Module,), {"__init__": __init__, "forward": forward})()


UNKNOWN = "its formula is not one that this package knows"
NORMALISE = {
    weight_first: UNKNOWN,
    unbiased: UNKNOWN,
    random_forward: "calls torch.rand_like",
    depends_on_rows: "reads y.flatten()[0]",
    scaled_by_an_attribute: UNKNOWN,
    only_for_three_dimensions: "dimensional input",
    only_in_float32: "needs float32",
}
DO_NOT = {
    divide_by_variance: "does not normalise over the last dimension",
    affine: "does not normalise over the last dimension",
    over_dim_1: "does not normalise over the last dimension",
    returns_pair: "does not return one tensor",
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
    assert not report.swapped and not report.skipped, report


@pytest.mark.parametrize(
    ("forward", "formula", "note"),
    [
        (
            eps_outside,
            "RMSNorm(eps=1e-06 outside the root, one rounding)",
            "float32 only",
        ),
        (grouped, "RMSNorm(eps=1e-06, rounds before weight, groups of 16)", ""),
        (no_upcast, "RMSNorm(eps=1e-06, one rounding)", "float32 only"),
    ],
)
def test_what_is_exact_in_some_calls_only_is_served_in_those(forward, formula, note):
    module, original = (lookalike(forward, "Thing") for _ in range(2))
    original.load_state_dict(module.state_dict())
    (record,) = report_on(module).swapped
    assert str(record.formula) == formula
    assert note in record.notes and bool(note) == bool(record.notes)
    with use_backend("reference"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(2, 3, 32).to(dtype)
            module.to(dtype), original.to(dtype)
            assert torch.equal(module(x), original(x))
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.equal(module(x), original(x))
