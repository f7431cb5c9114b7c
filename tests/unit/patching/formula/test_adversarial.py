"""Modules made to be mistaken: what a hostile reader found, each with the result of the module itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from reports import report_on
from torch import nn

from hf_rmsnorm import patch_model, use_backend

N = 64


class Base(nn.Module):
    def __init__(self, size=N):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.eps = nn.Parameter(1 + 0.3 * torch.randn(size)), 1e-6


def hat(x, eps=1e-6):
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def make(forward, **attributes):
    module = type("Thing", (Base,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def same(module, *inputs, change=lambda m: None, train=False):
    """The patched module gives the bits, dtype and strides of the unpatched one, changed in the same way."""
    original = copy.deepcopy(module)
    patch_model(module)
    for each in (module, original):
        change(each)
        each.train(train)
    outputs = []
    for each in (module, original):
        torch.manual_seed(1)
        with use_backend("reference" if each is module else "auto"):
            outputs.append(each(*inputs))
    y, expected = outputs
    assert y.dtype == expected.dtype and y.stride() == expected.stride() and torch.equal(y, expected)


def x_of(*shape, dtype=torch.float32):
    torch.manual_seed(3)
    return (torch.randn(*shape) * 1.5 + 0.2).to(dtype)


HALF = torch.bfloat16


@pytest.mark.parametrize("x_dtype, gate_dtype", [(HALF, torch.float32), (torch.float32, HALF), (HALF, HALF)])
@pytest.mark.parametrize("kind", ["to the gate's dtype", "torch's norm", "torch's norm, sigmoid"])
def test_gates_of_another_dtype(kind, x_dtype, gate_dtype):
    forwards = {
        "to the gate's dtype": lambda s, x, g: (s.weight * hat(x) * F.silu(g.float())).to(g.dtype),
        "torch's norm": lambda s, x, g: F.rms_norm(x, (N,), s.weight.to(x.dtype), s.eps) * F.silu(g),
        "torch's norm, sigmoid": lambda s, x, g: F.rms_norm(x, (N,), s.weight.to(x.dtype), s.eps) * torch.sigmoid(g),
    }
    same(make(forwards[kind]), x_of(3, N, dtype=x_dtype), x_of(3, N, dtype=gate_dtype))


def test_a_bias_of_another_dtype_than_the_weight():
    module = make(lambda s, x: s.weight * hat(x).to(x.dtype) + s.bias, bias=nn.Parameter(torch.rand(N)))

    def change(m):
        m.weight.data = m.weight.data.to(HALF)

    same(module, x_of(3, N, dtype=HALF), change=change)


def in_four_groups(self, x):
    h = x.float().unflatten(-1, (4, -1))
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2).to(x.dtype)


def over_a_fixed_length(self, x):
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) / self.dim + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("forward", [in_four_groups, over_a_fixed_length])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_rows_of_another_length_than_it_was_asked_with(forward, size):
    module = type("Thing", (nn.Module,), {"forward": forward})()
    module.dim = 64
    same(module, x_of(4, size))


def upcast_or_not(self, x):
    h = x.float() if self.upcast else x
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize(
    ("forward", "name", "before", "after"),
    [
        (upcast_or_not, "upcast", True, False),
        (lambda s, x: (y := s.weight * hat(x).to(x.dtype)).float() if s.fp32 else y, "fp32", False, True),
        (lambda s, x: s.weight * hat(x).to(x.dtype) * (2 if s.mode == "double" else 1), "mode", "none", "double"),
        (lambda s, x: s.weight * hat(x).to(s.out or x.dtype), "out", None, torch.float32),
        (lambda s, x: s.weight * hat(x).to(x.dtype) * (s.scale or 1), "scale", None, 2.0),
        (lambda s, x: s.weight * hat(x).clamp(-s.clip, s.clip).to(x.dtype), "clip", float("inf"), 1.0),
    ],
)
def test_attributes_set_after_the_patch(forward, name, before, after):
    module = make(forward, **{name: before})
    same(module, x_of(3, N, dtype=HALF), change=lambda m: (setattr(m, name, after), m.to(HALF)))


def test_a_parameter_added_after_the_patch():
    same(nn.LayerNorm(N, bias=False), x_of(3, N), change=lambda m: setattr(m, "bias", nn.Parameter(torch.ones(N))))
    same(nn.RMSNorm(N, elementwise_affine=False), x_of(3, N),
         change=lambda m: setattr(m, "weight", nn.Parameter(torch.full((N,), 2.0))))  # fmt: skip


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.weight * hat(x.contiguous()).to(x.dtype),
        lambda s, x: F.layer_norm(x.float(), (N,), None, None, s.eps).to(x.dtype) * 1,
        lambda s, x: F.layer_norm(x.float(), (N,), None, None, s.eps).to(x.dtype),
    ],
)
def test_an_output_that_is_always_contiguous(forward):
    module, x = make(forward), x_of(2, 4, 5, N).transpose(1, 2)
    original = copy.deepcopy(module)
    patch_model(module)
    for backend in ("reference", "triton"):
        with use_backend(backend):
            assert module(x).stride() == original(x).stride()


def test_an_image_norm_that_ends_contiguous():
    module = make(lambda s, x: F.layer_norm(x.permute(0, 2, 3, 1), (N,), s.weight, None, s.eps).permute(0, 3, 1, 2)
                  .contiguous())  # fmt: skip
    same(module, x_of(2, N, 3, 5))


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: F.dropout(s.weight * hat(x), 0.5 if s.training and torch.is_grad_enabled() else 0.0),
        lambda s, x: s.weight * hat(x) + (0.1 if s.training and x.requires_grad else 0.0),
        lambda s, x: s.weight * hat(x) + (1.0 if torch.is_grad_enabled() else 0.0),
        lambda s, x: s.weight * hat(x) + (0.5 if s.weight.requires_grad else 0.0),
    ],
)  # fmt: skip
def test_what_gradients_and_training_change(forward):
    same(make(forward), x_of(3, N).requires_grad_(), train=True)


def test_a_one_dimensional_input_that_gains_a_dimension():
    def forward(self, x):
        x = x[None] if x.dim() == 1 else x
        return self.weight * hat(x)

    same(make(forward), x_of(N))


def test_an_optional_second_input_that_is_no_gate_is_said():
    module = make(lambda s, x, residual=None: s.weight * hat(x if residual is None else x + residual))
    (record,) = report_on(module).swapped
    assert "calls that give 'residual' run its own forward" in record.notes
    same(make(type(module).forward), x_of(3, N), x_of(3, N))


def test_a_gate_that_must_be_given_and_comes_before_the_norm():
    def forward(self, x, gate):
        return self.weight * hat(x.float() * F.silu(gate.float()), self.eps).to(x.dtype)

    (record,) = report_on(make(forward)).swapped
    assert record.formula.gate == "silu_before" and record.formula.eps == 1e-6
    same(make(forward), x_of(3, N, dtype=HALF), x_of(3, N, dtype=HALF))


def test_a_gate_of_another_kind_is_named():
    (record,) = report_on(make(lambda s, x, gate: s.weight * hat(x) * torch.tanh(gate))).skipped
    assert "'gate', is no gate that this package knows" in record.reason


@pytest.mark.parametrize("heads", [None, 2])
def test_wide_gated_and_per_head_layer_norms_have_right_gradients(heads):
    from hf_rmsnorm import NormSpec
    from hf_rmsnorm.ops import fused_norm
    from hf_rmsnorm.reference import reference_norm

    gate = None if heads else "silu_after"
    spec = NormSpec(True, 1e-5, has_bias=not heads, gate=gate)
    shape = (3, heads, 9000) if heads else (3, 9000)
    tensors = [x_of(*shape), 1 + 0.1 * x_of(*shape[1:]), None if heads else x_of(9000), x_of(*shape) if gate else None]
    gradients = []
    for function in (fused_norm, reference_norm):
        leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
        with use_backend("triton"):
            y = function(*leaves[:3], spec, gate=leaves[3])
        gradients.append(torch.autograd.grad(y.square().sum(), [t for t in leaves if t is not None]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4 * theirs.abs().max().item())


def test_an_attribute_that_changed_is_the_one_that_is_named():
    module = make(upcast_or_not, upcast=True)
    patch_model(module)
    module.upcast = False
    (record,) = patch_model(module).skipped
    assert record.reason == "it runs its own forward: upcast is now False"
    assert "unpatch the model and patch it again" in record.cure


@pytest.mark.parametrize("name", ["QKNorm", "HeadRmsNorm", "AddNorm", "GatedNorm"])
def test_norms_by_other_names_are_listed(name):
    module = type(name, (Base,), {"forward": lambda s, x: (s.weight * hat(x), x)})()
    assert len(report_on(module).skipped) == 1
