"""A model is made without memory for its weights."""

import pytest
import torch
from torch import nn

from hf_rmsnorm.sources import without_weights


class ReadsValues(nn.Linear):
    """As remote code makes rates of stochastic depth."""

    def __init__(self):
        rates = torch.linspace(0, 1, 3).tolist()
        super().__init__(len(rates), 4)


@pytest.mark.parametrize("make", [lambda: nn.Linear(2**20, 2**20), ReadsValues])
def test_parameters_take_no_memory(make):
    model = without_weights(make)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not torch.empty(1).is_meta


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_of_the_model_is_raised(error):
    def make():
        raise error("wrong")

    with pytest.raises(error, match="wrong"):
        without_weights(make)
