"""Adaptive LayerNorms of diffusion models: found in the source of a forward, one launch each, the same bits."""

import copy
import unittest.mock

import pytest
import tiny_diffusion
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend, verify_equivalence
from hf_rmsnorm.fused import modulated as fused

# (the modulations of one forward that are one launch each, those of them that read a gated sum made there too).
MODULATED = {"DiT": (3, 0), "PixArt": (4, 0), "Flux": (6, 2), "SD3": (8, 3)}


class Modulations:
    """How many calls were one launch, how many of them with a sum, and how many norms were left to the operators."""

    def __init__(self):
        self.served = self.sums = self.left = 0

    def __enter__(self):
        real = fused.modulated_norm

        def modulated_norm(x, *args):
            found, is_sum = real(x, *args), len(args) > 5 and args[5] is not None
            self.served, self.sums = self.served + (found is not None), self.sums + (found is not None and is_sum)
            self.left += found is None and not is_sum
            return found

        self._patch = unittest.mock.patch.object(fused, "modulated_norm", modulated_norm)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()


@pytest.mark.parametrize("name", tiny_diffusion.MODELS)
def test_a_transformer_of_diffusers(name):
    pytest.importorskip("diffusers", reason="the library that this is for, of scripts/requirements")
    model, arguments = tiny_diffusion.build(name, torch.bfloat16)
    types = [type(m) for m in model.modules()]
    with torch.no_grad():
        expected = model(**arguments).sample
        report = patch_model(model, strict=True)
        with use_backend("triton"):
            assert torch.equal(model(**arguments).sample, expected)
            with Modulations() as found:  # which of two sums a norm reads has been seen
                assert torch.equal(model(**arguments).sample, expected)
    assert (found.served, found.sums, found.left) == (*MODULATED[name], 0)
    assert "* (1 + scale) + shift" in str(report)
    unpatch_model(model)
    assert types == [type(m) for m in model.modules()]


@pytest.mark.parametrize("name", ["DiT", "SD3"])
def test_verification_judges_modulations(name):
    pytest.importorskip("diffusers", reason="the library that this is for, of scripts/requirements")
    model, arguments = tiny_diffusion.build(name, torch.bfloat16)
    report = verify_equivalence(model, inputs=arguments, max_new_tokens=0, backend="triton", backward=True)
    assert report.passed, report


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
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}", reason="an older Transformers")
    model = getattr(module, name)(Config()).to(dtype)
    x, condition = torch.randn(2, 2, 5, 64).to(dtype)
    other = copy.deepcopy(model)

    def step(module):
        inputs = [x.clone().requires_grad_(), condition.clone().requires_grad_()]
        y = module(*inputs)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [*inputs, *module.parameters()])]

    expected = step(other)
    patch_model(model)
    with use_backend("triton"), Modulations() as found:
        got = step(model)
    assert (found.served, found.left) == (1, 0)
    close = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= close * b.abs().max()
    assert dtype == torch.float32 or torch.equal(got[0], expected[0])


class Modulated(nn.Module):
    """Whatever `formula` computes of a norm, a scale and a shift; `hook` is called between them."""

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


SERVED = {InOneExpression: 1, InTwoStatements: 1, WithoutShift: 1, ShiftWithAnEffect: 1}


@pytest.mark.parametrize("cls", [*SERVED, KeepsTheNorm, ShiftFromTheNorm, AnotherFactor])
def test_what_a_forward_writes(cls):
    model = cls()
    x, scale, shift = torch.randn(3, 5, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    expected = model(x.clone(), scale, shift)
    patch_model(model)
    with use_backend("triton"), Modulations() as found:
        assert torch.equal(model(x.clone(), scale, shift), expected)
    assert found.served == SERVED.get(cls, 0)


def test_a_hook_on_the_norm_sees_what_it_returns():
    model, seen = InOneExpression(), []
    patch_model(model)
    handle = model.norm.register_forward_hook(lambda module, args, y: seen.append(y))
    x, scale = torch.randn(3, 5, 64), torch.randn(3, 64)
    with use_backend("triton"), Modulations() as found:
        model(x, scale, scale)
        assert len(seen) == 1 and not found.served
        handle.remove()
        model(x, scale, scale)
        assert len(seen) == 1 and found.served == 1


def test_gates_that_do_not_fit_say_what_torch_says():
    model = InTwoStatements()
    x, scale = torch.randn(3, 5, 64), torch.randn(4, 64)
    with pytest.raises(RuntimeError) as own:
        model(x, scale, scale)
    patch_model(model)
    with use_backend("triton"), pytest.raises(RuntimeError) as ours:
        model(x, scale, scale)
    assert str(own.value) == str(ours.value)


class Operators(TorchDispatchMode):
    """Those that compute; views and allocations aside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition(".")[0]
        if not any(word in name for word in ("empty", "slice", "unsqueeze", "expand", "detach")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_four_operators_become_one_launch():
    model = InOneExpression()
    x, scale = torch.randn(3, 5, 64), torch.randn(3, 64)
    with Operators() as before, torch.no_grad():
        model(x, scale, scale)
    assert before.names == ["aten::add", "aten::native_layer_norm", "aten::mul", "aten::add"]
    patch_model(model)
    with use_backend("triton"), Operators() as after, count_launches() as launches, torch.no_grad():
        model(x, scale, scale)
    assert (after.names, dict(launches)) == ([], {"norm_forward": 1})


@pytest.mark.parametrize("missing", ["scale", "shift"])
def test_a_missing_scale_or_shift_raises_as_without_a_patch(missing):
    module, (x, *rest) = InOneExpression(), (torch.randn(2, 3, 64), *torch.randn(2, 2, 64))
    operands = dict(zip(("scale", "shift"), rest, strict=True)) | {missing: None}
    with pytest.raises(TypeError, match="NoneType"):
        module(x, **operands)
    patch_model(module)
    with pytest.raises(TypeError, match="NoneType"), use_backend("triton"):
        module(x, **operands)
