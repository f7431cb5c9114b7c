"""How far outputs are apart in a proof."""

import math

import torch

from hf_rmsnorm.conversion.proxy.prove import difference


def test_outputs_that_are_no_numbers_or_of_other_shapes_are_infinitely_apart():
    x, odd = (
        torch.ones(3, dtype=torch.float64),
        torch.tensor([1.0, math.nan, 1.0], dtype=torch.float64),
    )
    for outputs in ([x, odd], [odd, x], [x], [x, x[:1]], [x, x[None]]):
        assert difference([x, x], outputs) == math.inf
    assert difference([x, odd], [x, odd]) == math.inf
    # as logits of words that are hidden
    masked = torch.tensor([2.0, -math.inf], dtype=torch.float64)
    assert (
        difference([x, masked], [x, masked]) == 0.0
        and difference([x, masked], [x + 1, masked]) == 0.5
    )
    assert difference([x, masked], [x, masked.abs()]) == math.inf
