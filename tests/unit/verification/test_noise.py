"""The measures of two runs' logits, and the noise floor."""

import math

import pytest
import torch

from hf_rmsnorm.verification.noise import noise_floor


def test_measures_are_those_of_their_definition():
    exact = torch.randn(100, 7).double() / 3
    noise = torch.randn(100, 7)
    reference = exact.float()
    candidate = exact + 0.01 * noise
    candidate = candidate.float()

    sides = [side.split(30) for side in (reference, candidate, exact)]
    floor = noise_floor(*sides)

    assert floor.rows == 100
    assert not floor.passed
    between = reference.double() - candidate.double()
    assert floor.difference == between.abs().max()
    of_reference = reference.double() - exact
    assert floor.reference_max == of_reference.abs().max()
    of_candidate = candidate.double() - exact
    variance = of_candidate.square().mean()
    rms = variance.sqrt().item()
    assert floor.candidate_rms == pytest.approx(rms)


def test_words_hidden_from_the_vocabulary_do_not_widen_the_floor():
    exact = torch.randn(4, 6, dtype=torch.float64)
    exact[:, 2] = -math.inf
    exact[:, 3] = torch.finfo(torch.bfloat16).min
    y = exact.float()
    floor = noise_floor([y], [y], [exact])
    assert floor.passed
    assert floor.difference == 0
    assert floor.max_slack < 1e-5
    shown = y.clone()
    shown[:, 2] = 0.0
    floor = noise_floor([y], [shown], [exact])
    assert floor.difference == math.inf


def reason_of_failure(reference, candidate, exact):
    floor = noise_floor([reference], [candidate], [exact])
    assert not floor.passed
    return floor.reason


def test_nothing_to_compare_fails_and_says_so():
    empty = torch.zeros(0, 6)
    hidden = torch.full((2, 6), -math.inf)
    for y in (empty, hidden):
        reason = reason_of_failure(y, y, y.double())
        assert "nothing to compare" in reason


def test_nan_fails_and_says_so():
    exact = torch.randn(4, 6, dtype=torch.float64)
    y = exact.float()
    broken = y.clone()
    broken[1, 1] = math.nan
    reason = reason_of_failure(y, broken, exact)
    assert "changed model gives NaN or infinity" in reason
    reason = reason_of_failure(broken, broken, exact)
    assert "original itself gives NaN or infinity" in reason
    # from broken weights, so that all three are alike
    reason = reason_of_failure(broken, broken, broken.double())
    assert "NaN or infinity in float64 too" in reason
