"""Which weights write to the stream, read off gradients."""

import torch
from torch import nn

from hf_rmsnorm.conversion.proxy.layer_norms import find_layer_norms
from hf_rmsnorm.conversion.proxy.shift_invariance import shift_invariance_test


class Indexer(nn.Module):
    """Chooses by a norm without gradients, as the indexer of DeepSeek V3.2 does."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = self.project(x)
        with torch.no_grad():
            chosen = self.norm(x).argmax(-1)
        return x.gather(-1, chosen[..., None])


def test_norms_whose_inputs_have_no_gradients_find_no_weight():
    model = Indexer().double()
    inputs = {"x": torch.randn(2, 8, dtype=torch.float64)}
    norms, silent = find_layer_norms(model, inputs)
    assert [*norms] == ["norm"]
    assert not silent
    test = shift_invariance_test(model, inputs, norms)
    assert not test.residual_weights
    assert set(test.undetermined) == {"norm.weight", "norm.bias"}
