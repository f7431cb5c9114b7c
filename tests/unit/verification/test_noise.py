"""The measures of two runs' logits, and the noise floor."""

import math

import pytest
import torch

from hf_rmsnorm.verification.noise import noise_floor


def test_measures_are_those_of_their_definition():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(100, 7, generator=generator, dtype=torch.float64)
    exact = 3 * exact
    noise = torch.randn(exact.shape, generator=generator)
    reference = exact.float()
    candidate = exact + 0.01 * noise
    candidate = candidate.float()
    sides = [side.split([30, 70]) for side in (reference, candidate, exact)]
    floor = noise_floor(*sides)
    assert floor.rows == 100
    assert not floor.passed
    between = reference.double() - candidate.double()
    assert floor.difference == between.abs().max()
    of_reference = reference.double() - exact
    assert floor.reference_max == of_reference.abs().max()
    of_candidate = candidate.double() - exact
    rms = of_candidate.square().mean().sqrt()
    assert floor.candidate_rms == pytest.approx(rms.item())


def test_words_hidden_from_the_vocabulary_do_not_widen_the_floor():
    exact = torch.randn(4, 6, dtype=torch.float64)
    exact[:, 2] = -math.inf
    exact[:, 3] = torch.finfo(torch.bfloat16).min
    y = exact.float()
    floor = noise_floor([y], [y.clone()], [exact])
    assert floor.passed
    assert floor.difference == 0
    assert floor.max_slack < 1e-5
    shown = torch.where(y == -math.inf, 0.0, y)
    floor = noise_floor([y], [shown], [exact])
    assert floor.difference == math.inf


def test_nothing_to_compare_fails_and_says_so():
    for outputs in ([], [torch.zeros(0, 6)], [torch.full((2, 6), -math.inf)]):
        exact = [y.double() for y in outputs]
        floor = noise_floor(outputs, outputs, exact)
        assert not floor.passed
        assert "nothing to compare" in floor.reason


def test_nan_fails_and_says_so():
    exact = torch.randn(4, 6, dtype=torch.float64)
    y = exact.float()
    broken = y.clone()
    broken[1, 1] = math.nan
    floor = noise_floor([y], [broken], [exact])
    assert not floor.passed
    assert "changed model gives NaN or infinity" in floor.reason
    floor = noise_floor([broken], [broken], [exact])
    assert not floor.passed
    assert "original itself gives NaN or infinity" in floor.reason
    for bad in (math.nan, math.inf):  # from broken weights, so that all three are alike
        broken[1, 1] = bad
        floor = noise_floor([broken], [broken], [broken.double()])
        assert not floor.passed
        assert "NaN or infinity in float64 too" in floor.reason
