"""`verify_equivalence(backward=True)` compares each gradient of each fused piece: one that
is 2% off is found.
"""

import pytest
import tiny_models
import torch
from torch import nn

from hf_rmsnorm import use_backend, verify_equivalence
from hf_rmsnorm.ops.autograd import NormFunction
from hf_rmsnorm.ops.qk import _QKFunction, _RotaryFunction

SIZE = 32


def rows(module):
    model = nn.Sequential(nn.Linear(SIZE, SIZE), module)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3, 0.4, generator)
    return model.eval(), {"input": torch.randn(3, 40, SIZE, generator=generator)}


class Modulated(nn.Module):
    """Scale, shift and gate from a table, as Wan and PixArt have them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, SIZE))
        self.inner = nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False, eps=1e-6)

    def forward(self, x):
        scale, shift, gate = self.table.chunk(3)
        x = x + gate * self.inner(x)
        y = self.norm(x) * (1 + scale) + shift
        return x + y


def norm():
    return rows(nn.LayerNorm(SIZE))


def modulation():
    return rows(Modulated())


def llama():
    model = tiny_models.build("llama", num_hidden_layers=1).eval()
    return model, {"input_ids": tiny_models.token_ids(2, 8)}


def qwen3():
    model = tiny_models.build("qwen3", num_hidden_layers=1).eval()
    return model, {"input_ids": tiny_models.token_ids(2, 8)}


# the model, the function whose backward is broken, the place of a gradient among its
# results, the name of the gradient in the report
BROKEN = {
    "norm, x": (norm, NormFunction, 1, "1, input"),
    "norm, weight": (norm, NormFunction, 2, "1, weight"),
    "norm, bias": (norm, NormFunction, 3, "1, bias"),
    "sum, x": (llama, NormFunction, 1, "add_and_norm 1, x"),
    "sum, residual": (llama, NormFunction, 8, "add_and_norm 1, residual"),
    "sum, weight": (llama, NormFunction, 2, "add_and_norm 1, norms.0.weight"),
    "q/k norms, q": (qwen3, _QKFunction, 1, "q"),
    "q/k norms, k": (qwen3, _QKFunction, 2, "k"),
    "q/k norms, weight of q": (qwen3, _QKFunction, 3, "norms.0.weight"),
    "q/k norms, weight of k": (qwen3, _QKFunction, 4, "norms.1.weight"),
    "rotary, q": (llama, _RotaryFunction, 1, "q"),
    "rotary, k": (llama, _RotaryFunction, 2, "k"),
    "modulation, scale": (modulation, NormFunction, 5, "scale"),
    "modulation, shift": (modulation, NormFunction, 6, "shift"),
    "modulation, gate": (modulation, NormFunction, 7, "add_and_modulate 1, x"),
}
DTYPES = [torch.bfloat16, torch.float32]


def verified(build, dtype):
    model, inputs = build()
    for name, x in inputs.items():
        inputs[name] = x.to(dtype) if x.is_floating_point() else x
    with use_backend("triton"):
        report = verify_equivalence(
            model.to(dtype), inputs=inputs, max_new_tokens=0, backward=True
        )
    for parameter in model.parameters():
        assert parameter.requires_grad
        assert parameter.grad is None
    return report


def off_by_2_percent(function, place, monkeypatch):
    own = function.backward

    def backward(ctx, *dys):
        gradients = [*own(ctx, *dys)]
        if gradients[place] is not None:
            gradients[place] = gradients[place] * 1.02
        return tuple(gradients)

    monkeypatch.setattr(function, "backward", staticmethod(backward))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("build", [norm, llama, qwen3, modulation])
def test_right_gradients_pass(build, dtype):
    report = verified(build, dtype)
    assert report.passed, str(report)
    names = {check.path.rpartition(", ")[2] for check in report.gradients}
    expected = [name for of, _, _, name in BROKEN.values() if of is build]
    assert names.issuperset(name.rpartition(", ")[2] for name in expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", BROKEN)
def test_a_gradient_that_is_off_by_2_percent_is_found(gradient, dtype, monkeypatch):
    build, function, place, name = BROKEN[gradient]
    off_by_2_percent(function, place, monkeypatch)
    report = verified(build, dtype)
    assert not report.passed
    failed = [check.path for check in report.gradients if not check.passed]
    assert any(path.endswith(name) for path in failed)
