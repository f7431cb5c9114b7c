"""What of a module decides whether its formula still holds, and which calls it serves."""

import math

import pytest
import torch
from torch import nn

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.fused.recipe import Recipe
from hf_rmsnorm.ops.limits import shapes_fit

SPEC = NormSpec(centered=False, eps=1e-6, has_weight=True, rounding="once")
RECIPE = Recipe(SPEC, weight="weight", eps="eps", eps_value=1e-6)


@pytest.mark.parametrize(
    ("eps", "expected"), [(1e-6, SPEC), (0.5, SPEC.with_eps(0.5)), (0, SPEC.with_eps(0.0)), (-1.0, None),
                          (math.nan, None), (math.inf, None), ("1e-6", None)],
)  # fmt: skip
def test_the_eps_that_the_module_holds_now(eps, expected):
    norm = nn.RMSNorm(8, eps=1e-6)
    norm.eps = eps
    assert RECIPE.spec_of(norm) == expected


def test_a_setting_that_has_changed_and_a_parameter_that_has_come_are_named():
    recipe = Recipe(SPEC, weight="weight", settings=(("mode", "a"),), absent=("bias",))
    norm = nn.RMSNorm(8)
    norm.mode = "a"
    assert recipe.spec_of(norm) == SPEC and recipe.changes(norm) == []
    norm.mode, norm.bias = "b", nn.Parameter(torch.zeros(8))
    assert recipe.spec_of(norm) is None
    assert recipe.changes(norm) == ["mode is now b", "it has a bias now"]


X, HALF = torch.ones(2, 3, 4), torch.ones(2, 3, 4, dtype=torch.bfloat16)
ONES = torch.ones(4)
LAYER = NormSpec(True, 1e-5, functional=True)


@pytest.mark.parametrize(
    "weight, bias, gate, fits",
    [
        (ONES, None, None, True),
        (ONES, None, X, True),
        (ONES, None, X[:1], False),
        (torch.ones(3, 4), torch.ones(3, 4), None, True),
        (torch.ones(3, 4), ONES, None, False),
        (torch.ones(2, 4), None, None, False),
        (torch.ones(1), None, None, False),
    ],
)
def test_shapes_that_broadcast_are_not_the_formulas(weight, bias, gate, fits):
    assert shapes_fit(X, weight, bias, gate) == fits
    assert not shapes_fit(torch.ones(()), None, None, None)


def test_dtypes_that_torchs_own_operators_take_together(monkeypatch):
    half, layer = ONES.bfloat16(), Recipe(LAYER)
    assert layer.suits(HALF, half, half) and layer.suits(HALF, None, None)
    for weight, bias in ((ONES, half), (half, ONES), (None, ONES)):
        assert not layer.suits(HALF, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        # whose operators in float32 are others on a CPU
        assert not layer.suits(HALF, ONES, ONES)
    is_meta = lambda device_type: device_type == "meta"  # noqa: E731
    monkeypatch.setattr(torch, "is_autocast_enabled", is_meta)
    assert layer.suits(HALF.to("meta"), ONES, ONES)
    assert not layer.suits(HALF, ONES, ONES)
