"""How far outputs are apart in a proof."""

import math

import torch

from hf_rmsnorm.conversion.proxy.prove import difference


def test_outputs_that_are_no_numbers_or_of_other_shapes_are_infinitely_apart():
    x = torch.ones(3)
    odd = torch.tensor([1.0, math.nan, 1.0])
    others = [
        [x, odd],
        [odd, x],
        [x],
        [x, x[:1]],
        [x, x[None]],
    ]
    for outputs in others:
        assert difference([x, x], outputs) == math.inf
    assert difference([odd], [odd]) == math.inf


def test_logits_of_words_that_are_hidden_count_as_equal():
    logits = torch.tensor([2.0, -math.inf])
    changed = torch.tensor([3.0, -math.inf])
    shown = torch.tensor([2.0, math.inf])
    assert difference([logits], [logits]) == 0.0
    assert difference([logits], [changed]) == 0.5
    assert difference([logits], [shown]) == math.inf
