"""Code that reads a sum of a fused model gets the values and the gradient of the
unpatched one.
"""

import pytest
import torch
from fusion_models import IDS, Block, row
from transformers import MptConfig, MptForCausalLM

from hf_rmsnorm import patch_model, use_backend

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


def test_a_hook_on_a_live_models_mlp_finds_the_gradient_of_the_residual():
    """MPT gives its MLP the sum beside the norm of it."""
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2}
    config = MptConfig(**sizes, vocab_size=128, max_seq_len=64)
    model = MptForCausalLM(config).eval()
    kept = []
    mlp = model.transformer.blocks[0].ffn
    mlp.register_forward_hook(lambda module, args, output: kept.append(args[1]))

    def gradient():
        kept.clear()
        with use_backend("triton"):
            loss = model(IDS, use_cache=False).logits.square().sum()
            return torch.autograd.grad(loss, kept)[0]

    expected = gradient()
    patch_model(model)
    assert (gradient() - expected).norm() < 1e-5 * expected.norm()


class SteersItsData(Block):
    steer = None

    def forward(self, x):
        h = x + self.a(self.n1(x))
        if self.steer is not None:
            h.data.add_(self.steer)
        return h + self.b(self.n2(h))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_sum_that_is_written_to_on_a_branch_is_normalised_as_it_is_then(mode):
    model = row(SteersItsData(), SteersItsData())
    model[0].steer = model[1].steer = 3 * torch.arange(32.0)
    with mode():
        expected = model(X)
        patch_model(model)
        with use_backend("triton"):
            torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-4)
