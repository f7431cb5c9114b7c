"""``residual + gate * x`` before a modulated norm: one launch with it, wherever a
forward writes that; equal bits.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.counting import Operators
from hf_rmsnorm import count_launches, patch_model, use_backend, verify_equivalence

SIZE = 64


class Block(nn.Module):
    """A residual block whose one norm is modulated, and whose sum is gated."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE, bias=False)
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Linear(SIZE, SIZE, bias=False)


class InOneExpression(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition.chunk(3, dim=-1)
        x = x + gate[:, None] * self.inner(x)
        return x + self.mlp(self.norm(x) * (1 + scale[:, None]) + shift[:, None])


class InTwoStatements(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition.chunk(3, dim=-1)
        inner = self.inner(x)
        inner = gate.unsqueeze(1) * inner
        x = x + inner
        inner = self.mlp(self.norm(x) * (1 + scale[:, None]) + shift[:, None])
        return x + inner


class WithoutGate(Block):
    def forward(self, x, condition):
        _, scale, shift = condition[:, None].chunk(3, dim=-1)
        x = x + self.inner(x)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class OnABranch(Block):
    gated = True

    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        inner = self.inner(x)
        if self.gated:
            inner = gate * inner
        x = x + inner
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class KeepsTheProduct(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        inner = gate * self.inner(x)
        x = x + inner
        return x + self.mlp(self.norm(x) * (1 + scale) + shift) + inner.sum()


class HandsTheProductOn(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        inner = (gate * self.inner(x)).to(x.dtype)
        x = x + inner
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class ScaleIsWrittenTo(Block):
    def forward(self, x, condition):
        gate, scale, shift = (
            part.clone() for part in condition[:, None].chunk(3, dim=-1)
        )
        x = x + gate * self.inner(x)
        scale.sub_(1)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class SumIsWrittenTo(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        x = x + gate * self.inner(x)
        x.mul_(2)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class SumIsSeen(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        x = x + gate * self.inner(x)
        y = self.mlp(x)
        return y + self.norm(x) * (1 + scale) + shift


class TwoStreams(Block):
    """As HunyuanVideo writes it."""

    def __init__(self):
        super().__init__()
        self.other_norm = nn.LayerNorm(SIZE, elementwise_affine=False, eps=1e-6)

    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        inner, context = self.inner(x), x * 2
        other = inner * 3
        x = x + inner * gate
        context = context + other * gate
        y = self.norm(x)
        z = self.other_norm(context)
        y = y * (1 + scale) + shift
        z = z * (1 + scale) + shift
        return x + self.mlp(y) + context + self.mlp(z)


# In one launch with all behind it, and nothing else.
ONE = InOneExpression, InTwoStatements, WithoutGate
OTHERS = OnABranch, KeepsTheProduct, HandsTheProductOn, SumIsSeen, TwoStreams
WRITING = ScaleIsWrittenTo, SumIsWrittenTo
FORMS = *ONE, *OTHERS, *WRITING


def build(cls, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, condition = torch.randn(2, 5, SIZE).to(dtype), torch.randn(2, 3 * SIZE).to(dtype)
    return cls().to(dtype), x, condition


def plain(cls):
    model, *inputs = build(cls)
    with torch.no_grad():
        return model(*inputs)


@pytest.mark.parametrize(
    "mode",
    [torch.no_grad, torch.inference_mode, torch.enable_grad],
    ids=lambda m: m.__name__,
)
@pytest.mark.parametrize("cls", FORMS)
def test_whatever_a_forward_writes_the_bits_are_the_same(cls, mode):
    model, *inputs = build(cls)
    patch_model(model, strict=True)
    with use_backend("triton"), mode():
        for _ in range(3):
            assert torch.equal(model(*inputs), plain(cls))


@pytest.mark.parametrize("cls", ONE)
def test_six_operators_become_one_launch(cls):
    model, *inputs = build(cls)
    report = patch_model(model, strict=True)
    assert "+ norm * (1 + scale) + shift in one launch" in str(report)
    with (
        use_backend("triton"),
        torch.no_grad(),
        count_launches() as launches,
        Operators() as operators,
    ):
        model(*inputs)
    counts = {
        name: operators.counts[name] for name in ("add", "mul", "native_layer_norm")
    }
    assert dict(launches) == {"norm_forward": 1}
    # the last residual sum
    assert counts == {"add": 1, "mul": 0, "native_layer_norm": 0}


def test_sums_and_norms_of_two_streams_in_turn():
    model, *inputs = build(TwoStreams)
    report = patch_model(model, strict=True)
    (layer,) = report.layers
    assert (
        layer.fused
        == "+ norm * (1 + scale) + shift, + other_norm * (1 + scale) + shift, each in one launch"
    )
    with (
        use_backend("triton"),
        torch.no_grad(),
        count_launches() as launches,
        Operators() as operators,
    ):
        model(*inputs)
    assert dict(launches) == {"norm_forward": 2}
    assert operators.counts["mul"] == 2  # of the context and of the other stream


@pytest.mark.parametrize("cls", FORMS)
def test_gradients_are_those_of_the_operators(cls):
    def step(model, *inputs):
        inputs = [t.clone().requires_grad_() for t in inputs]
        y = model(*inputs)
        return [
            y.detach(),
            *torch.autograd.grad(y.square().sum(), [*inputs, *model.parameters()]),
        ]

    expected = step(*build(cls, torch.float32))
    model, *inputs = build(cls, torch.float32)
    patch_model(model, strict=True)
    with use_backend("triton"):
        got = step(model, *inputs)
        again = [
            checkpoint(
                model,
                *(t.clone().requires_grad_() for t in inputs),
                use_reentrant=False,
            )
        ]
    for a, b in zip([*got, *again], [*expected, expected[0]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong", ["gate", "residual", "scale"])
def test_what_does_not_fit_raises_what_torch_raises(wrong):
    class Given(Block):
        def forward(self, x, residual, gate, scale):
            x = residual + gate * x
            return self.norm(x) * (1 + scale) + scale

    shapes = {
        "x": (2, 5, SIZE),
        "residual": (2, 5, SIZE),
        "gate": (2, 1, SIZE),
        "scale": (2, 1, SIZE),
    }
    given = {
        n: torch.randn(3, 7, SIZE) if n == wrong else torch.randn(shape)
        for n, shape in shapes.items()
    }
    model = Given()
    with pytest.raises(RuntimeError) as own:
        model(**given)
    patch_model(model, fuse_residual=True)
    with use_backend("triton"), torch.no_grad(), pytest.raises(RuntimeError) as ours:
        model(**given)
    assert str(own.value) == str(ours.value)


def test_verification_judges_the_sum_with_the_norm():
    class Row(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([InOneExpression(), WithoutGate()])

        def forward(self, x, condition):
            for layer in self.layers:
                x = layer(x, condition)
            return x

    model, x, condition = build(Row)
    inputs = {"x": x, "condition": condition}
    with use_backend("triton"):
        report = verify_equivalence(
            model, inputs=inputs, max_new_tokens=0, backward=True
        )
    assert report.passed, report
