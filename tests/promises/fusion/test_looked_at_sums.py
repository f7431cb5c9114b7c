"""Code that reads a sum of a fused model gets the values and the gradient of the
unpatched one.
"""

import pytest
import torch
from fusion_models import IDS, Block, fused, row
from torch import nn
from transformers import MptConfig, MptForCausalLM

from hf_rmsnorm import patch_model, unpatch_model, use_backend

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))


class GivesTheSum(Block):
    """A module beside the norm is given the sum, as MPT's MLP is."""

    class Mlp(nn.Linear):
        def forward(self, x, residual):
            return super().forward(x) + residual

    def __init__(self):
        super().__init__()
        self.b = self.Mlp(32, 32)

    def forward(self, x):
        h = x + self.a(self.n1(x))
        return self.b(self.n2(h), h)


class HasAHookPoint(Block):
    """As TransformerLens marks the places that its users hook."""

    def __init__(self):
        super().__init__()
        self.mid = nn.Identity()

    def forward(self, x):
        h = self.mid(x + self.a(self.n1(x)))
        return h + self.b(self.n2(h))


LAST = None


class LeavesItInAGlobal(Block):
    def forward(self, x):
        global LAST
        LAST = x + self.a(self.n1(x))
        return LAST + self.b(self.n2(LAST))


def test_the_gradient_of_a_sum_that_is_left_in_a_global():
    model = row(LeavesItInAGlobal(), LeavesItInAGlobal())
    gradients = []
    for fuse_residual in (False, True):
        patch_model(model, fuse_residual=fuse_residual)
        with use_backend("triton"):
            loss = model(X).square().sum()
        gradients.append(torch.autograd.grad(loss, LAST)[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)


def by_forward_hook(model, kept):
    model[1].b.register_forward_hook(lambda module, args, output: kept.append(args[1]))


def by_hook_point(model, kept):
    model[1].mid.register_forward_hook(lambda module, args, output: kept.append(output))


WAYS = [(GivesTheSum, by_forward_hook), (HasAHookPoint, by_hook_point)]


def asked_for(total, loss):
    return torch.autograd.grad(loss, total)[0]


def changed_by_a_hook(total, loss):
    total.register_hook(lambda grad: grad * 0)
    loss.backward()
    return torch.zeros_like(total)


@pytest.mark.parametrize("look", [asked_for, changed_by_a_hook])
@pytest.mark.parametrize(("layer", "get"), WAYS, ids=lambda each: each.__name__)
def test_the_gradient_of_a_sum_is_the_unpatched_models(layer, get, look):
    gradients = []
    for patch in (False, True):
        model, kept = row(layer(), layer()), []
        get(model, kept)
        if patch:
            report = patch_model(model)
            assert len(fused(report)) == 2
        with use_backend("triton") if patch else torch.enable_grad():
            loss = model(X).square().sum()
            found = look(kept[0], loss)
        gradients.append(
            [found, *(p.grad for p in model.parameters() if p.grad is not None)]
        )
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_hook_on_a_live_models_mlp_finds_the_gradient_of_the_residual():
    model = MptForCausalLM(
        MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=99, max_seq_len=64)
    ).eval()
    kept = []
    model.transformer.blocks[0].ffn.register_forward_hook(
        lambda module, args, output: kept.append(args[1])
    )

    def gradient():
        kept.clear()
        with use_backend("triton"):
            return torch.autograd.grad(
                model(IDS % 99, use_cache=False).logits.square().sum(), kept
            )[0]

    expected = gradient()
    patch_model(model)
    assert (gradient() - expected).norm() < 1e-5 * expected.norm()


class SteersInPlace(Block):
    def forward(self, x, steer=None):
        h = x + self.a(self.n1(x))
        if steer is not None:
            h += steer
        return h + self.b(self.n2(h))


class SteersAView(Block):
    def forward(self, x, steer=None):
        h = x + self.a(self.n1(x))
        if steer is not None:
            h.view(-1, 32)[:, :].add_(steer)
        return h + self.b(self.n2(h))


class SteersItsData(Block):
    def forward(self, x, steer=None):
        h = x + self.a(self.n1(x))
        if steer is not None:
            h.data.add_(steer)
        return h + self.b(self.n2(h))


STEERED = [SteersInPlace, SteersAView, SteersItsData]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("layer", STEERED)
def test_a_sum_that_is_written_to_on_an_untried_branch_is_normalised_as_it_is_then(
    layer, mode
):
    def steered(module, args, kwargs):
        return args, {"steer": 3 * torch.arange(32.0)}

    model = row(layer(), layer())
    for each in list(model)[:2]:
        each.register_forward_pre_hook(steered, with_kwargs=True)
    with mode():
        expected = model(X)
    patch_model(model)
    with mode(), use_backend("triton"):
        got = model(X)
    unpatch_model(model)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
