"""Which modules of a model are LayerNorms, by running it."""

import torch

from hf_rmsnorm.conversion.proxy.layer_norms import find_layer_norms
from hf_rmsnorm.conversion.proxy.model import give_weights


class Odd(torch.nn.Module):
    """Norms of several kinds, of which `f` is not called."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.LayerNorm(8, eps=1e-3)
        self.b = torch.nn.RMSNorm(8, eps=1e-6)
        self.c = torch.nn.LayerNorm(8, elementwise_affine=False)
        self.d = torch.nn.Linear(8, 8)
        self.e = torch.nn.GroupNorm(2, 8)
        self.f = torch.nn.LayerNorm(8)
        self.g = torch.nn.LayerNorm(8, bias=False)

    def forward(self, x):
        x = self.g(self.d(self.c(self.b(self.a(x) + 0.3) + 0.2) + x))
        return {"logits": self.e(x.flatten(0, -2)), "loss": x.sum()}


def test_layer_norms_are_known_by_what_they_compute():
    model = Odd().double()
    give_weights(model)
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    norms, silent = find_layer_norms(model, {"x": x})
    eps = {}
    for path, norm in norms.items():
        eps[path] = norm.spec.eps
    assert eps == {"a": 1e-3, "c": 1e-5, "g": 1e-5}
    assert silent == ["f"]
    assert norms["g"].bias is None
    assert norms["c"].weight is None
    assert torch.equal(norms["a"].weight, model.a.weight)
    assert torch.equal(norms["a"].bias, model.a.bias)
