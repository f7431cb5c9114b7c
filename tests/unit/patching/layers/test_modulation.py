"""Which functions that a forward gives a norm's result are computed with the norm, and what happens to all others."""

import pytest
import torch
from torch import nn

from benchmarks.counting import Operators
from hf_rmsnorm import patch_model, use_backend


def scaled(normed, scale, shift):
    if scale.ndim == 2 and shift.ndim == 2:
        scale = scale.unsqueeze(1)
        shift = shift.unsqueeze(1)
    factor = scale.float() + 1.0
    return normed * factor.to(scale.dtype) + shift


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64, elementwise_affine=False)

    def scaled(self, x, condition, mask=None):
        scale = condition
        gate = condition + 1
        if mask is not None:
            scale = torch.where(mask, scale, gate)
        return x * (1 + scale) + gate, gate

    def twice(self, x, condition):
        return x * (1 + condition) + x

    def unshifted(self, x, condition):
        return x * (1 + condition)

    def written(self, x, condition):
        condition.mul_(2)
        return x * (1 + condition) + condition

    def written_by_a_function(self, x, condition):
        torch.clamp(condition, max=0.5, out=condition)
        return x * (1 + condition) + condition


class ByAFunction(Modulated):
    def forward(self, x, scale):
        return scaled(self.norm(x), scale, scale)


class ByAMethod(Modulated):
    def forward(self, x, scale):
        normed = self.norm(x)
        y, gate = self.scaled(normed, scale[:, None])
        return y + gate


class ByAHelperThatDropsIt(Modulated):
    def dropped(self, x, condition):
        y = condition
        if condition is None:
            y = x * (1 + condition) + condition
        return y

    def forward(self, x, scale):
        return self.dropped(self.norm(x), scale)


class ByAnotherNorm(Modulated):
    """Which is called later."""

    def __init__(self):
        super().__init__()
        self.other = nn.LayerNorm(64, elementwise_affine=False)

    def forward(self, x, scale):
        return self.norm(x) * (1 + self.other(scale)[:, None])


class ReadAgain(Modulated):
    def forward(self, x, scale):
        normed = self.norm(x)
        y, gate = self.scaled(normed, scale[:, None])
        return y + gate + normed


class ReadTwice(Modulated):
    def forward(self, x, scale):
        return self.twice(self.norm(x), scale[:, None])


class Unshifted(Modulated):
    def forward(self, x, scale):
        return self.unshifted(self.norm(x), scale[:, None])


class Written(Modulated):
    def forward(self, x, scale):
        copied = scale[:, None] * 1
        return self.written(self.norm(x), copied)


class WrittenByAFunction(Modulated):
    def forward(self, x, scale):
        copied = scale[:, None] * 1
        return self.written_by_a_function(self.norm(x), copied)


SERVED = ByAFunction, ByAMethod
OTHERS = ReadAgain, ReadTwice, Unshifted, Written, WrittenByAFunction


def operands():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 64, generator=generator)
    scale = torch.randn(2, 64, generator=generator)
    return x.bfloat16(), scale.bfloat16()


@pytest.mark.parametrize("cls", [*SERVED, *OTHERS])
def test_the_bits_are_the_same(cls):
    model = cls()
    x, scale = operands()
    expected = model(x, scale)
    patch_model(model)
    with use_backend("triton"), Operators() as operators:
        y = model(x, scale)
    assert torch.equal(y, expected)
    assert bool(operators.counts["mul"]) == (cls in OTHERS)


@pytest.mark.parametrize("cls", SERVED)
def test_gradients(cls):
    def gradients(model):
        x, scale = operands()
        x = x.float().requires_grad_()
        scale = scale.float().requires_grad_()
        loss = model(x, scale).square().sum()
        return torch.autograd.grad(loss, [x, scale])

    model = cls()
    expected = gradients(model)
    patch_model(model)
    with use_backend("triton"):
        fused = gradients(model)
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-4)


def test_a_helper_that_is_replaced_after_the_patch_is_given_the_norms_result():
    model = ByAMethod()
    patch_model(model)

    def summed(normed, condition):
        return normed.sum(), condition.sum()

    model.scaled = summed
    x, scale = operands()
    with use_backend("triton"):
        assert model(x, scale).shape == ()


@pytest.mark.parametrize("cls", [ByAMethod, ByAHelperThatDropsIt, ByAnotherNorm])
def test_hooks_on_the_norms_see_what_they_return(cls):
    model = cls()
    seen = []

    def hook(module, args, y):
        seen.append(y.shape)

    for norm in model.children():
        norm.register_forward_hook(hook)
    model(*operands())
    expected = seen.copy()
    seen.clear()
    patch_model(model)
    with use_backend("triton"):
        model(*operands())
    assert seen == expected
