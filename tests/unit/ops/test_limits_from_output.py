"""Which parameters leave enough of the input in the output, at each bound, and what a
zero among them does.
"""

import pytest
import torch
from computed import compute_norm
from torch import nn

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops import input_needed
from hf_rmsnorm.ops.limits import (
    LEAST_SCALE,
    MOST_BIAS,
    MOST_COLUMNS_WITH_BIAS,
    SMALLEST_SCALE,
    serves_as_input,
)

D = 64
SPEC = NormSpec(False, 1e-6)
GEMMA = NormSpec(False, 1e-6, weight_offset=1.0)
BIASED = NormSpec(True, 1e-6, has_bias=True)


def filled(first, rest=1.0):
    t = torch.full((D,), rest)
    t[0] = first
    return nn.Parameter(t)


@pytest.mark.parametrize(
    "weight, bias, spec, refusal",
    [
        (None, None, SPEC, ""),
        (None, filled(0.0), BIASED, "a bias alone"),
        (filled(1.0), None, SPEC, ""),
        (filled(-LEAST_SCALE), None, SPEC, ""),
        (filled(LEAST_SCALE * 0.99), None, SPEC, "a weight is below"),
        (filled(0.0), None, SPEC, "a weight is below"),
        (filled(float("nan")), None, SPEC, "a weight is below"),
        (filled(SMALLEST_SCALE, SMALLEST_SCALE), None, SPEC, ""),
        (
            filled(SMALLEST_SCALE * 0.99, SMALLEST_SCALE),
            None,
            SPEC,
            "a weight is below",
        ),
        (filled(0.0, 0.0), None, GEMMA, ""),
        (filled(-1.0, 0.0), None, GEMMA, "a weight is below"),
        (filled(1.0), filled(-MOST_BIAS), BIASED, ""),
        (filled(1.0), filled(MOST_BIAS * 1.01), BIASED, "a bias is above 4 times"),
        (filled(0.5), filled(3.9), BIASED, "a bias is above 4 times"),
        (
            torch.ones(MOST_COLUMNS_WITH_BIAS + 1),
            torch.zeros(MOST_COLUMNS_WITH_BIAS + 1),
            BIASED,
            "8,192 columns",
        ),
        (torch.ones(D, device="meta"), None, SPEC, ""),  # nothing is there to be read
        (torch.ones(0), None, SPEC, ""),
    ],
)
def test_parameters_at_each_bound(weight, bias, spec, refusal):
    reason = input_needed(weight, bias, spec)
    assert refusal in reason if refusal else not reason


@pytest.mark.parametrize(
    "spec, refused",
    [
        (SPEC, False),
        (NormSpec(False, 1e-6, rounding="rstd"), True),
        (NormSpec(False, 1e-6, gate="silu_after"), True),
        (NormSpec(False, 1e-6, eps_outside=True), True),
        (NormSpec(False, 1e-6, rounding="weight_dtype"), False),
    ],
)
def test_formulas_whose_input_follows_from_their_output(spec, refused):
    assert bool(input_needed(filled(1.0), None, spec)) == refused


@pytest.mark.parametrize("spec", [SPEC, BIASED], ids=["without a bias", "with a bias"])
def test_a_scale_that_became_zero_gives_no_nan(spec):
    weight = filled(0.0)
    bias = None
    if spec.has_bias:
        bias = filled(0.5)
    x = torch.randn(
        3, D, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    y = compute_norm(x, weight, bias, spec, keep_output=True)
    dx, dweight = torch.autograd.grad(y, [x, weight], torch.ones_like(y))
    assert dx.isfinite().all()
    assert dweight.isfinite().all()
    assert dweight[0] == 0.0
    assert (dweight[1:] != 0.0).all()


FUNCTIONAL = NormSpec(True, 1e-6, functional=True)
X = torch.ones(2, 3, 32)
STRIDED = torch.ones(3, 2, 32).transpose(0, 1)


@pytest.mark.parametrize(
    "y, x, spec, serves",
    [
        (X, X, SPEC, True),
        (X.bfloat16(), X, SPEC, False),
        (X, STRIDED, SPEC, False),
        (STRIDED, STRIDED, SPEC, True),
        (X, STRIDED, FUNCTIONAL, True),
        (X[..., :31].contiguous(), X[..., :31].contiguous(), SPEC, False),
    ],
)
def test_outputs_that_stand_for_their_inputs(y, x, spec, serves):
    assert serves_as_input(y, x, spec) == serves
