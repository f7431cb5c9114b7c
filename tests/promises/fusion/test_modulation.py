"""Scale, shift and gate of diffusion models: one launch with their norm wherever a
forward may be read so, and the model's own bits, gradients and errors everywhere.
"""

import pytest
import torch
from torch import nn

from benchmarks.counting import Operators
from hf_rmsnorm import count_launches, patch_model, use_backend

SIZE = 64


class Block(nn.Module):
    """A layer of x, gate, scale and shift. Its norms run in `launches`, and `products`
    stay operators of the model.
    """

    launches, products = 1, 0

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE, bias=False)
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False, eps=1e-6)
        self.relu = nn.ReLU(inplace=True)


class InOneExpression(Block):
    def forward(self, x, gate, scale, shift):
        x = x + gate * self.inner(x)
        return self.norm(x) * (1 + scale) + shift


class InSeveralStatements(Block):
    def forward(self, x, gate, scale, shift):
        inner = self.inner(x)
        inner = gate * inner
        x = x + inner
        y = self.norm(x)
        z = (scale + 1.0) * y + shift
        return z


class BehindOtherStatements(Block):
    """As Cosmos writes it."""

    def forward(self, x, gate, scale, shift):
        y = self.norm(x)
        if scale.ndim == 2:
            scale = scale.unsqueeze(1)
            shift = shift.unsqueeze(1)
        y = y * (1 + scale) + shift
        return y


class WithoutGateAndShift(Block):
    def forward(self, x, gate, scale, shift):
        x = x + self.inner(x)
        return self.norm(x) * (1 + scale[:, 0][:, None])


class TwoStreams(Block):
    """As HunyuanVideo writes it."""

    launches, products = 2, 2  # of the context and of the other stream

    def __init__(self):
        super().__init__()
        self.other_norm = nn.LayerNorm(SIZE, elementwise_affine=False, eps=1e-6)

    def forward(self, x, gate, scale, shift):
        inner = self.inner(x)
        context = x * 2
        other = inner * 3
        x = x + inner * gate
        context = context + other * gate
        y = self.norm(x)
        z = self.other_norm(context)
        y = y * (1 + scale) + shift
        z = z * (1 + scale) + shift
        return x + y + context + z


class OneOfTwoSums(Block):
    products = 1
    twice = True

    def forward(self, x, gate, scale, shift):
        a = self.inner(x)
        b = x.sin()
        x = x + gate * a
        if self.twice:
            x = x + gate * b
        return self.norm(x) * (1 + scale) + shift


class AnotherFactor(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        return self.norm(x) * (2 + scale) + shift


class KeepsTheNorm(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        y = self.norm(x)
        z = y * (1 + scale) + shift
        return y + z


class KeepsTheProduct(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        inner = gate * self.inner(x)
        x = x + inner
        y = self.norm(x) * (1 + scale) + shift
        return y + inner.sum()


class AddsTheProductToItself(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        inner = gate * self.inner(x)
        x = inner + inner
        return self.norm(x) * (1 + scale) + shift


class TheNormIsWrittenTo(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        y = self.norm(x)
        y += 1
        y = y * (1 + scale) + shift
        return y


class TheInputIsBoundBetween(Block):
    products = 2

    def forward(self, x, gate, scale, shift):
        y = self.norm(x)
        x = x * 0
        z = y * (1 + scale) + x
        return z


class AnOperandIsWrittenTo(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        h = self.inner(x)
        p = gate.detach() * h
        h += 1
        x = x + p
        return self.norm(x) * (1 + scale) + shift


class TheSumIsWrittenTo(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        x = x + gate * self.inner(x)
        x.mul_(2)
        return x + self.norm(x) * (1 + scale) + shift


class AChildWritesToTheScale(Block):
    products = 2

    def forward(self, x, gate, scale, shift):
        scale = scale * 1
        x = x + gate * self.inner(x)
        self.relu(scale)
        return self.norm(x) * (1 + scale) + shift


class MadeWithoutGradients(Block):
    products = 1

    def forward(self, x, gate, scale, shift):
        h = self.inner(x)
        with torch.no_grad():
            p = gate * h
        x = x + p
        return self.norm(x) * (1 + scale) + shift


class Inner(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, scale, shift):
        return self.norm(x) * (1 + scale) + shift


class TwoModulesShareANorm(Block):
    launches = 2

    def __init__(self):
        super().__init__()
        self.sub = Inner(self.norm)

    def forward(self, x, gate, scale, shift):
        x = x + gate * self.inner(x)
        y = self.norm(x) * (1 + scale) + shift
        return y + self.sub(x, scale, shift)


FORMS = Block.__subclasses__()


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, rows, SIZE).to(dtype) for rows in (5, 1, 1, 1)]


@pytest.mark.parametrize("cls", FORMS)
def test_the_bits_are_the_models_and_what_can_be_one_launch_is(cls):
    model = cls().bfloat16()
    expected = model(*operands(torch.bfloat16))
    patch_model(model, strict=True)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode) * 2:
        given = operands(torch.bfloat16)
        with (
            use_backend("triton"),
            mode(),
            count_launches() as launches,
            Operators() as operators,
        ):
            y = model(*given)
        assert torch.equal(y, expected), mode
    assert launches == {"norm_forward": cls.launches}
    assert operators.counts["mul"] == cls.products


def step(model, given):
    """The output, and the gradients of all operands and parameters."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    y = model(*(leaf * 1 for leaf in leaves))
    wanted = [*leaves, *model.parameters()]
    loss = (y * torch.linspace(-1, 1, SIZE)).sum()
    return [y.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True)]


@pytest.mark.parametrize("cls", FORMS)
def test_gradients_are_those_of_the_operators(cls):
    model = cls()
    expected = step(model, operands())
    patch_model(model, strict=True)
    with use_backend("triton"):
        result = step(model, operands())
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_six_operators_become_one_launch():
    model, given = InOneExpression(), operands()
    with torch.no_grad(), Operators() as before:
        model(*given)
    assert before.counts == {"mm": 1, "add": 3, "mul": 2, "native_layer_norm": 1}
    report = patch_model(model, strict=True)
    assert "+ norm * (1 + scale) + shift in one launch" in str(report)
    with use_backend("triton"), torch.no_grad(), Operators() as after:
        model(*given)
    assert after.computing == 1  # the product with the weight of `inner`


def test_sums_and_norms_of_two_streams_are_listed():
    (layer,) = patch_model(TwoStreams(), strict=True).layers
    first, second = "+ norm * (1 + scale) + shift", "+ other_norm * (1 + scale) + shift"
    assert layer.fused == f"{first}, {second}, each in one launch"


@pytest.mark.parametrize("wrong", [1, 2])
def test_what_does_not_fit_raises_what_torch_raises(wrong):
    model, given = InOneExpression(), operands()
    given[wrong] = torch.ones(3, 7, SIZE)
    with pytest.raises(RuntimeError) as theirs:
        model(*given)
    patch_model(model)
    with use_backend("triton"), torch.no_grad(), pytest.raises(RuntimeError) as ours:
        model(*given)
    assert str(ours.value) == str(theirs.value)


class Config:
    hidden_size, intermediate_size, latent_dim, mlp_bias = 64, 96, 16, False
    rms_norm_eps = layer_norm_eps = 1e-5
    hidden_act = "silu"


HEADS = [
    ("vibevoice", "VibeVoiceDiffusionHeadAdaLayerNorm", torch.bfloat16, 2e-2),
    ("gradium_phonon_tts", "GradiumPhononTTSFlowResBlock", torch.float32, 1e-5),
]


@pytest.mark.parametrize(("family", "name", "dtype", "close"), HEADS)
def test_heads_of_transformers_train_alike(family, name, dtype, close):
    path = f"transformers.models.{family}.modeling_{family}"
    module = pytest.importorskip(path, reason="an older Transformers")
    model = getattr(module, name)(Config()).to(dtype)
    x_and_condition = torch.randn(2, 2, 5, SIZE).to(dtype)
    expected = step(model, x_and_condition)
    patch_model(model)
    with use_backend("triton"), count_launches() as launches:
        results = step(model, x_and_condition)
    assert launches["norm_forward"] == launches["norm_backward"] == 1
    assert dtype == torch.float32 or torch.equal(results[0], expected[0])
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours - theirs).abs().max() <= close * theirs.abs().max()
