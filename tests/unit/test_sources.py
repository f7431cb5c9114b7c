"""A model is made without memory for its weights."""

import pytest
import torch
from torch import nn

from hf_rmsnorm.sources import without_weights


def reads_values():
    """As remote code makes the rates of its layers."""
    return nn.Linear(len(torch.linspace(0, 1, 3).tolist()), 4)


def reads_an_array():
    return nn.Linear(len(torch.linspace(0, 1, 3).numpy()), 4)


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(2**20, 2**20), reads_values, reads_an_array]
)
def test_parameters_take_no_memory(make):
    model = without_weights(make)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not torch.empty(1).is_meta


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_of_the_model_is_raised_at_once(error):
    made = []

    def make():
        made.append(None)
        raise error("wrong")

    with pytest.raises(error, match="wrong"):
        without_weights(make)
    assert len(made) == 1
