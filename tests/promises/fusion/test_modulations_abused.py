"""Forwards in which a product, a sum, a scale or what is computed ahead of them is
looked at, written to or left.
"""

import copy

import pytest
import torch
from torch import nn

from hf_rmsnorm import patch_model, use_backend

SIZE = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = (
            nn.Linear(SIZE, SIZE, bias=False),
            nn.LayerNorm(SIZE, elementwise_affine=False),
        )
        self.relu = nn.ReLU(inplace=True)


class AnOperandIsWrittenTo(Block):
    def forward(self, x, gate, scale, shift):
        h = self.inner(x)
        p = gate * h
        h += 1
        x = x + p
        return self.norm(x) * (1 + scale) + shift


class MadeWithoutGradients(Block):
    def forward(self, x, gate, scale, shift):
        h = self.inner(x)
        with torch.no_grad():
            p = gate * h
        x = x + p
        return self.norm(x) * (1 + scale) + shift


class AChildWritesToTheScale(Block):
    def forward(self, x, gate, scale, shift):
        scale = scale * 1
        x = x + gate * self.inner(x)
        self.relu(scale)
        return self.norm(x) * (1 + scale) + shift


class TheSumIsHooked(Block):
    def forward(self, x, gate, scale, shift):
        x = x + gate * self.inner(x)
        y = self.norm(x) * (1 + scale) + shift
        if x.requires_grad:
            x.register_hook(lambda g: g * 0.5)
        return y + x * 2


class LeavesALoop(Block):
    def forward(self, x, gate, scale, shift):
        for i in range(2):
            x = x + gate * (x * 0.5)
            y = self.norm(x) * (1 + scale) + shift
            if i == 1:
                break
            x = y * 0.5
        return y**3 + x


class AScaleThatIsComputed(Block):
    @property
    def noise(self):
        return torch.rand(SIZE)

    def forward(self, x, gate, scale, shift):
        torch.manual_seed(1)
        x = x + gate * self.inner(x)
        return self.norm(x) * (1 + self.noise.to(x.dtype)) + shift


class ArgumentsInATuple(Block):
    def forward(self, x, gate, scale, shift):
        rows = (x, gate)
        return self.norm(*rows) * (1 + scale) + shift


class CatchesTheProductsError(Block):
    def forward(self, x, gate, scale, shift):
        try:
            p = gate[..., :3] * x
        except RuntimeError:
            p = gate * x
        x = x + p
        return self.norm(x) * (1 + scale) + shift


class Inner(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale) + shift


class TwoModulesShareANorm(Block):
    def __init__(self):
        super().__init__()
        self.sub = Inner(self.norm)

    def forward(self, x, gate, scale, shift):
        x = x + gate * self.inner(x)
        return self.sub(x, scale, shift) + (self.norm(x) * (1 + scale) + shift)


class AViewOfTheFactor(Block):
    def forward(self, x, gate, scale, shift):
        part, _ = torch.cat([scale, shift], -1).view(2, 4, SIZE // 2).chunk(2, -1)
        part = torch.cat([part, part], -1).transpose(1, 2).contiguous().transpose(1, 2)
        return self.norm(x) * (1 + part[:, :1]).view(2, 1, SIZE) + shift


CLASSES = list(Block.__subclasses__())


def inputs(dtype):
    torch.manual_seed(0)
    return [torch.randn(2, length, SIZE).to(dtype) for length in (5, 1, 1, 1)]


def outcome(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


def both(cls, function, dtype=torch.float32):
    own = cls().to(dtype)
    ours = copy.deepcopy(own)
    patch_model(ours)
    expected = outcome(function, own)
    with use_backend("triton"):
        return expected, outcome(function, ours), outcome(function, ours)


def gradients(model):
    x, gate, scale, shift = inputs(torch.float32)
    y = model(x.requires_grad_(), gate.requires_grad_() * 1, scale, shift)
    wanted = [x, gate, model.inner.weight]
    return torch.autograd.grad(
        (y * torch.linspace(-1, 1, SIZE)).sum(), wanted, allow_unused=True
    )


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, torch.enable_grad],
    ids=lambda m: m.__name__,
)
@pytest.mark.parametrize("cls", CLASSES)
def test_outputs_and_errors_are_those_of_the_model(cls, mode):
    def run(model):
        with mode():
            return model(*[t.clone() for t in inputs(torch.bfloat16)])

    expected, *found = both(cls, run, torch.bfloat16)
    for y in found:
        assert (
            torch.equal(y, expected)
            if isinstance(expected, torch.Tensor)
            else y == expected
        )


@pytest.mark.parametrize("cls", CLASSES)
def test_gradients_and_their_absence_too(cls):
    expected, *found = both(cls, gradients)
    for each in found:
        for a, b in zip(each, expected, strict=True):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            else:
                assert a == b


class OneOfTwoSums(Block):
    twice = True

    def forward(self, x, gate, scale, shift):
        a, b = self.inner(x), x.sin()
        x = x + gate * a
        if self.twice:
            x = x + gate * b
        return self.norm(x) * (1 + scale) + shift


def test_transforms_of_functorch():
    def run(model):
        given = inputs(torch.float32)
        mapped = torch.func.vmap(model)(*[t[None] for t in given])
        return mapped, torch.func.grad(lambda x: model(x, *given[1:]).square().sum())(
            given[0]
        )

    expected, *found = both(OneOfTwoSums, run)
    for made in found:
        for a, b in zip(made, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
