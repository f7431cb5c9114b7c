"""The measures of two runs' logits, and the noise floor."""

import math

import pytest
import torch
import torch.nn.functional as F

from hf_rmsnorm.verification.noise import compare_logits


def test_measures_are_those_of_their_definition():
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(100, 7, generator=generator, dtype=torch.float64) * 3
    reference, candidate = (
        exact.float(),
        (exact + 0.01 * torch.randn(exact.shape, generator=generator)).float(),
    )
    difference, floor = compare_logits(
        [reference[:30], reference[30:]],
        [candidate[:30], candidate[30:]],
        [exact[:30], exact[30:]],
    )
    d = (reference.double() - candidate.double()).abs()
    p, q = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    kl = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    expected = (
        100,
        7,
        d.max(),
        kl.mean(),
        (p.argmax(-1) == q.argmax(-1)).double().mean(),
    )
    got = (
        difference.tokens,
        difference.vocabulary,
        difference.max_abs,
        difference.kl_mean,
        difference.top1_agreement,
    )
    assert got == pytest.approx([float(value) for value in expected])
    assert floor.reference_max == (reference.double() - exact).abs().max().item()
    assert floor.candidate_rms == pytest.approx(
        (candidate.double() - exact).square().mean().sqrt().item()
    )
    assert not floor.passed


def test_words_hidden_from_the_vocabulary_do_not_widen_the_floor():
    exact = torch.randn(4, 6, dtype=torch.float64)
    exact[:, 2], exact[:, 3] = -math.inf, torch.finfo(torch.bfloat16).min
    y = exact.float()
    difference, floor = compare_logits([y], [y.clone()], [exact])
    assert difference.max_abs == difference.kl_mean == 0
    assert floor.passed and floor.max_slack < 1e-5
    difference, _ = compare_logits([y], [torch.where(y == -math.inf, 0.0, y)], [exact])
    assert difference.max_abs == math.inf


def test_nothing_to_compare_fails_and_says_so():
    for outputs in ([], [torch.zeros(0, 6)], [torch.full((2, 6), -math.inf)]):
        _, floor = compare_logits(outputs, outputs, [y.double() for y in outputs])
        assert not floor.passed and "nothing to compare" in floor.reason


def test_nan_fails_and_says_so():
    exact = torch.randn(4, 6, dtype=torch.float64)
    y = exact.float()
    broken = y.clone()
    broken[1, 1] = math.nan
    _, floor = compare_logits([y], [broken], [exact])
    assert not floor.passed and "changed model gives NaN or infinity" in floor.reason
    _, floor = compare_logits([broken], [broken], [exact])
    assert not floor.passed and "original itself gives NaN or infinity" in floor.reason
    for bad in (math.nan, math.inf):  # from broken weights, so that all three are alike
        broken[1, 1] = bad
        _, floor = compare_logits([broken], [broken], [broken.double()])
        assert not floor.passed and "NaN or infinity in float64 too" in floor.reason
