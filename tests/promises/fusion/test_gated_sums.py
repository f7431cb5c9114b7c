"""``residual + gate * x`` before a modulated norm: one launch with it, wherever a forward writes that; equal bits."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2RMSNorm

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend, verify_equivalence

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


class GateBehind(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        x = self.inner(x) * gate + x
        y = self.norm(x)
        y = y * (1 + scale) + shift
        return x + self.mlp(y)


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


class AnotherSumOnABranch(Block):
    twice = True

    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        x = x + gate * self.inner(x)
        if self.twice:
            x = x + gate * self.mlp(x)
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


class LooksAtTheProductLater(Block):
    def forward(self, x, condition):
        def product():
            return inner.sum()

        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        inner = gate * self.inner(x)
        x = x + inner
        return x + self.mlp(self.norm(x) * (1 + scale) + shift) + product()


class ScaleComesLater(Block):
    def forward(self, x, condition):
        x = x + condition[:, None, :SIZE] * self.inner(x)
        scale, shift = condition[:, None, SIZE:].chunk(2, dim=-1)
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class ScaleIsAnotherLater(Block):
    def forward(self, x, condition):
        gate, scale, shift = condition[:, None].chunk(3, dim=-1)
        x = x + gate * self.inner(x)
        scale = scale - 1
        return x + self.mlp(self.norm(x) * (1 + scale) + shift)


class ScaleIsWrittenTo(Block):
    def forward(self, x, condition):
        gate, scale, shift = (part.clone() for part in condition[:, None].chunk(3, dim=-1))
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


# In one launch with all behind it, and nothing else.
ONE = InOneExpression, GateBehind, InTwoStatements, WithoutGate
OTHERS = (
    OnABranch,
    KeepsTheProduct,
    LooksAtTheProductLater,
    HandsTheProductOn,
    ScaleComesLater,
    AnotherSumOnABranch,
    SumIsSeen,
)
WRITING = ScaleIsAnotherLater, ScaleIsWrittenTo, SumIsWrittenTo
FORMS = *ONE, *OTHERS, *WRITING


class Operators(TorchDispatchMode):
    """Those that compute."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition(".")[0].partition("::")[2]
        if name in ("add", "mul", "native_layer_norm"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def build(cls, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, condition = torch.randn(2, 5, SIZE).to(dtype), torch.randn(2, 3 * SIZE).to(dtype)
    return cls().to(dtype), x, condition


def plain(cls):
    model, *inputs = build(cls)
    with torch.no_grad():
        return model(*inputs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda m: m.__name__)
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
    with use_backend("triton"), torch.no_grad(), count_launches() as launches, Operators() as operators:
        model(*inputs)
    assert (dict(launches), operators.names) == ({"norm_forward": 1}, ["add"])  # the last residual sum


def test_of_two_sums_the_norm_is_computed_with_the_one_it_reads():
    model, *inputs = build(AnotherSumOnABranch)
    patch_model(model, strict=True)
    with use_backend("triton"), torch.no_grad():
        model(*inputs)
        with count_launches() as launches:
            model(*inputs)
    assert dict(launches) == {"norm_forward": 1}


@pytest.mark.parametrize("cls", FORMS)
def test_gradients_are_those_of_the_operators(cls):
    def step(model, *inputs):
        inputs = [t.clone().requires_grad_() for t in inputs]
        y = model(*inputs)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [*inputs, *model.parameters()])]

    expected = step(*build(cls, torch.float32))
    model, *inputs = build(cls, torch.float32)
    patch_model(model, strict=True)
    with use_backend("triton"):
        got = step(model, *inputs)
        again = [checkpoint(model, *(t.clone().requires_grad_() for t in inputs), use_reentrant=False)]
    for a, b in zip([*got, *again], [*expected, expected[0]], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_training_takes_one_launch_forward_and_one_backward():
    model, x, condition = build(InTwoStatements)
    patch_model(model, strict=True)
    with use_backend("triton"), count_launches() as launches:
        model(x.requires_grad_(), condition.requires_grad_()).sum().backward()
    assert dict(launches) == {"norm_forward": 1, "norm_backward": 1}


def test_a_hook_on_the_norm_sees_what_it_returns():
    model, *inputs = build(InOneExpression)
    patch_model(model, strict=True)
    seen = []
    handle = model.norm.register_forward_hook(lambda module, args, y: seen.append(args[0]))
    with use_backend("triton"), torch.no_grad():
        assert torch.equal(model(*inputs), plain(InOneExpression)) and len(seen) == 1
        handle.remove()
        assert torch.equal(model(*inputs), plain(InOneExpression)) and len(seen) == 1


@pytest.mark.parametrize("wrong", ["gate", "residual", "scale"])
def test_what_does_not_fit_raises_what_torch_raises(wrong):
    class Given(Block):
        def forward(self, x, residual, gate, scale):
            x = residual + gate * x
            return self.norm(x) * (1 + scale) + scale

    shapes = {"x": (2, 5, SIZE), "residual": (2, 5, SIZE), "gate": (2, 1, SIZE), "scale": (2, 1, SIZE)}
    given = {n: torch.randn(3, 7, SIZE) if n == wrong else torch.randn(shape) for n, shape in shapes.items()}
    model = Given()
    with pytest.raises(RuntimeError) as own:
        model(**given)
    patch_model(model, fuse_residual=True)
    with use_backend("triton"), torch.no_grad(), pytest.raises(RuntimeError) as ours:
        model(**given)
    assert str(own.value) == str(ours.value)


def test_copies_and_what_is_undone():
    model, *inputs = build(InOneExpression)
    patch_model(model, strict=True)
    other = copy.deepcopy(model)
    with use_backend("triton"), torch.no_grad():
        assert torch.equal(other(*inputs), plain(InOneExpression))
    unpatch_model(model)
    assert type(model) is InOneExpression


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
    report = verify_equivalence(model, inputs=inputs, max_new_tokens=0, backend="triton", backward=True)
    assert report.passed, report


@pytest.mark.full
def test_layers_of_transformers():
    """`EsmFold2AtomBlock` and `DiTDecoderLayer` of Qwen2.5-Omni, as they stand but for what is between the norms."""
    from transformers.models.esmfold2 import modeling_esmfold2 as esm
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as omni

    class Attention(nn.Linear):
        def forward(self, hidden_states, *_, **__):
            return super().forward(hidden_states), None

    (atoms,) = (c for c in vars(esm).values() if isinstance(c, type) and "self.adaln_linear(" in source_of(c))
    layer = nn.Module.__new__(atoms)
    nn.Module.__init__(layer)
    layer.adaln_linear = nn.Linear(SIZE, 6 * SIZE, bias=False)
    layer.self_attn, layer.mlp = Attention(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    layer.input_layernorm, layer.post_attention_layernorm = EsmFold2RMSNorm(), EsmFold2RMSNorm()
    given = torch.randn(2, 5, SIZE), torch.randn(2, 5, SIZE), None, None
    assert one_launch_less(layer.bfloat16(), *(t if t is None else t.bfloat16() for t in given)) == 2

    layer = nn.Module.__new__(omni.DiTDecoderLayer)
    nn.Module.__init__(layer)
    layer.attn_norm, layer.ff = omni.Qwen2_5_OmniAdaLayerNormZero(SIZE), nn.Linear(SIZE, SIZE)
    layer.ff_norm = nn.LayerNorm(SIZE, elementwise_affine=False, eps=1e-6)

    class Inner(nn.Linear):
        def forward(self, hidden_states, **_):
            return super().forward(hidden_states)

    layer.attn, layer.look_ahead_block, layer.look_backward_block = Inner(SIZE, SIZE), 0, 0
    given = torch.randn(2, 5, SIZE).bfloat16(), torch.randn(2, SIZE).bfloat16(), None, torch.zeros(2, 1, 5, 5)
    assert one_launch_less(layer.bfloat16(), *given) == 2


def source_of(cls):
    import inspect

    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def one_launch_less(layer, *given):
    """The launches of a forward with two modulated norms, one behind a gated sum; all else is as before."""
    with torch.no_grad():
        expected = layer(*given)
        patch_model(layer, strict=True)
        with use_backend("triton"), count_launches() as launches, Operators() as operators:
            assert torch.equal(layer(*given), expected)
    assert operators.names.count("mul") == 1 and operators.names.count("add") == 1  # the last gated sum
    return launches["norm_forward"]
