"""Adaptive LayerNorms of diffusion models: found in the source of a forward, one launch
each, the same bits.
"""

import copy

import pytest
import torch
from torch import nn

from benchmarks.counting import Operators
from hf_rmsnorm import count_launches, patch_model, use_backend


class Config:
    hidden_size, intermediate_size, latent_dim, mlp_bias = 64, 96, 16, False
    rms_norm_eps = layer_norm_eps = 1e-5
    hidden_act = "silu"


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        ("vibevoice", "VibeVoiceDiffusionHeadAdaLayerNorm", torch.bfloat16),
        ("gradium_phonon_tts", "GradiumPhononTTSFlowResBlock", torch.float32),
    ],
)
def test_heads_of_transformers_train_alike(family, name, dtype):
    torch.manual_seed(0)
    module = pytest.importorskip(
        f"transformers.models.{family}.modeling_{family}",
        reason="an older Transformers",
    )
    model = getattr(module, name)(Config()).to(dtype)
    x, condition = torch.randn(2, 2, 5, 64).to(dtype)
    other = copy.deepcopy(model)

    def step(module):
        inputs = [x.clone().requires_grad_(), condition.clone().requires_grad_()]
        y = module(*inputs)
        return [
            y.detach(),
            *torch.autograd.grad(
                y.float().square().sum(), [*inputs, *module.parameters()]
            ),
        ]

    expected = step(other)
    patch_model(model)
    with use_backend("triton"), count_launches() as launches:
        got = step(model)
    assert launches["norm_forward"] == launches["norm_backward"] == 1
    close = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= close * b.abs().max()
    assert dtype == torch.float32 or torch.equal(got[0], expected[0])


class Modulated(nn.Module):
    """Whatever `formula` computes of a norm, a scale and a shift; `hook` is called
    between them.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64, elementwise_affine=False)


class InOneExpression(Modulated):
    def forward(self, x, scale, shift):
        return shift[:, None] + (scale + 1)[:, None, :] * self.norm(x)


class InTwoStatements(Modulated):
    def forward(self, x, scale, shift):
        y = self.norm(x)
        y = y * (1.0 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return y


class WithoutShift(Modulated):
    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale[:, None])


class UnderAnotherName(Modulated):
    def forward(self, x, scale, shift):
        y = self.norm(x)
        z = y * (1 + scale[:, None]) + shift[:, None]
        return z


class BehindOtherStatements(Modulated):
    """As Cosmos writes it."""

    def forward(self, x, scale, shift):
        y = self.norm(x)
        if scale.ndim == 2:
            scale, shift = (part.unsqueeze(1) for part in (scale, shift))
        y = y * (1 + scale) + shift
        return y


class APreparedFactor(Modulated):
    """As Z-Image writes it."""

    def forward(self, x, scale, shift):
        scale, shift = 1.0 + scale[:, None], shift[:, None]
        return self.norm(x) * scale + shift


class InFloat32(Modulated):
    """As Wan writes it."""

    def forward(self, x, scale, shift):
        scale, shift = scale[:, None].float(), shift[:, None].float()
        return (self.norm(x.float()) * (scale + 1.0) + shift).type_as(x)


class WrittenToBetween(Modulated):
    def forward(self, x, scale, shift):
        y = self.norm(x)
        y += 1
        y = y * (1 + scale[:, None]) + shift[:, None]
        return y


class TheInputIsBoundBetween(Modulated):
    def forward(self, x, scale, shift):
        y = self.norm(x)
        x, scale = x * 0, scale[:, None]
        z = y * (1 + scale) + x
        return z


class AFactorThatIsNoScale(Modulated):
    def forward(self, x, scale, shift):
        scale = scale[:, None]
        return self.norm(x) * scale + shift[:, None]


class KeepsTheNorm(Modulated):
    def forward(self, x, scale, shift):
        y = self.norm(x)
        z = y * (1 + scale[:, None]) + shift[:, None]
        return y + z


class ShiftFromTheNorm(Modulated):
    def forward(self, x, scale, shift):
        y = self.norm(x)
        y = y * (1 + scale[:, None]) + y[:, :1]
        return y


class ShiftWithAnEffect(Modulated):
    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale[:, None]) + x.zero_()


class AnotherFactor(Modulated):
    def forward(self, x, scale, shift):
        return self.norm(x) * (2 + scale[:, None]) + shift[:, None]


SERVED = [
    InOneExpression, InTwoStatements, WithoutShift, ShiftWithAnEffect, UnderAnotherName,
    BehindOtherStatements, APreparedFactor, InFloat32,
]  # fmt: skip
APART = [
    KeepsTheNorm, ShiftFromTheNorm, AnotherFactor, WrittenToBetween,
    AFactorThatIsNoScale,
]  # fmt: skip
MULTIPLIES_ITSELF = [TheInputIsBoundBetween]


@pytest.mark.parametrize("cls", [*SERVED, *APART, *MULTIPLIES_ITSELF])
def test_what_a_forward_writes(cls):
    model = cls()
    x, scale, shift = (
        torch.randn(3, 5, 64).bfloat16(),
        torch.randn(3, 64).bfloat16(),
        torch.randn(3, 64).bfloat16(),
    )
    expected = model(x.clone(), scale, shift)
    patch_model(model)
    with use_backend("triton"), Operators() as operators:
        assert torch.equal(model(x.clone(), scale, shift), expected)
    assert operators.counts["mul"] == (cls in APART) + 2 * (cls in MULTIPLIES_ITSELF)


def test_a_hook_on_the_norm_sees_what_it_returns():
    model, seen = InOneExpression(), []
    patch_model(model)
    handle = model.norm.register_forward_hook(lambda module, args, y: seen.append(y))
    x, scale = torch.randn(3, 5, 64), torch.randn(3, 64)
    with use_backend("triton"), Operators() as operators:
        model(x, scale, scale)
        assert len(seen) == operators.counts["mul"] == 1
        handle.remove()
        model(x, scale, scale)
        assert len(seen) == operators.counts["mul"] == 1


def test_four_operators_become_one_launch():
    model = InOneExpression()
    x, scale = torch.randn(3, 5, 64), torch.randn(3, 64)
    with Operators() as before, torch.no_grad():
        model(x, scale, scale)
    assert before.counts == {"add": 2, "native_layer_norm": 1, "mul": 1}
    patch_model(model)
    with (
        use_backend("triton"),
        Operators() as after,
        count_launches() as launches,
        torch.no_grad(),
    ):
        model(x, scale, scale)
    assert (after.computing, dict(launches)) == (0, {"norm_forward": 1})


def test_a_missing_shift_raises_as_without_a_patch():
    module = InOneExpression()
    x = torch.randn(2, 3, 64)
    operands = {"scale": torch.randn(2, 64), "shift": None}
    with pytest.raises(TypeError, match="NoneType"):
        module(x, **operands)
    patch_model(module)
    with pytest.raises(TypeError, match="NoneType"), use_backend("triton"):
        module(x, **operands)
