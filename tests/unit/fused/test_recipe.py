"""What of a module decides whether its formula still holds, and which calls it serves."""

import math

import pytest
import torch
from torch import nn

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.fused.recipe import Recipe, operands

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


def test_operands_are_none_where_one_is_missing():
    norm = nn.RMSNorm(8, eps=1e-6)
    weight, bias, spec = operands(norm, RECIPE)
    assert weight is norm.weight and bias is None and spec == SPEC
    norm.weight = None
    assert operands(norm, RECIPE) is None


def test_which_rows_a_call_normalises():
    x = torch.ones(2, 3, 4)
    assert RECIPE.rows_of(x) is x
    assert Recipe(SPEC, layout="channels_first").rows_of(x).shape == (2, 4, 3)
    heads = Recipe(NormSpec(centered=False, eps=1e-6, rounding="once", group_size=4), layout="heads")
    assert heads.rows_of(x).shape == (2, 12) and heads.rows_of(torch.ones(2, 3, 5)) is None
    assert Recipe(SPEC, dims=(2,)).rows_of(x) is None
    assert Recipe(SPEC, only_float32=True).rows_of(x.half()) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert Recipe(SPEC, not_under_autocast=True).rows_of(x) is None


@pytest.mark.parametrize(
    "how", [{"layout": "heads"}, {"dims": (2,)}, {"only_float32": True}, {"gate": "gate"}, {"other_input": "mask"},
            {"row_major": True}, {"not_under_autocast": True}, {"input_written": True}],
)  # fmt: skip
def test_a_norm_with_anything_besides_is_not_simple(how):
    assert RECIPE.is_simple and not Recipe(SPEC, **how).is_simple


def test_a_formula_fits_rows_of_the_weights_size_and_of_no_other():
    weight = torch.ones(8)
    assert RECIPE.fits(torch.ones(2, 8), weight, None)
    assert not RECIPE.fits(torch.ones(2, 4), weight, None)
    assert not RECIPE.fits(torch.ones(2, 8, dtype=torch.int64), weight, None)
    assert not Recipe(SPEC, hidden_size=4).fits(torch.ones(2, 8), None, None)
