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


def same(module, *inputs, change=lambda m: None):
    """The patched module gives the bits, dtype and strides of the unpatched one, changed in the same way."""
    original = copy.deepcopy(module)
    assert patch_model(module).swapped
    for each in (module, original):
        change(each)
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


def to_the_gates_dtype(self, x, gate):
    return (self.weight * hat(x) * F.silu(gate.float())).to(gate.dtype)


def torch_norm(self, x, gate):
    return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps) * F.silu(gate)


def torch_norm_and_sigmoid(self, x, gate):
    return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps) * torch.sigmoid(gate)


@pytest.mark.parametrize("x_dtype, gate_dtype", [(HALF, torch.float32), (torch.float32, HALF), (HALF, HALF)])
@pytest.mark.parametrize("forward", [to_the_gates_dtype, torch_norm, torch_norm_and_sigmoid])
def test_gates_of_another_dtype(forward, x_dtype, gate_dtype):
    same(make(forward), x_of(3, N, dtype=x_dtype), x_of(3, N, dtype=gate_dtype))


def with_bias(self, x):
    return self.weight * hat(x).to(x.dtype) + self.bias


def test_a_bias_of_another_dtype_than_the_weight():
    module = make(with_bias, bias=nn.Parameter(torch.rand(N)))

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


def in_float32_or_not(self, x):
    y = self.weight * hat(x).to(x.dtype)
    return y.float() if self.fp32 else y


def doubled_in_a_mode(self, x):
    return self.weight * hat(x).to(x.dtype) * (2 if self.mode == "double" else 1)


def to_a_dtype(self, x):
    return self.weight * hat(x).to(self.out or x.dtype)


def scaled(self, x):
    return self.weight * hat(x).to(x.dtype) * (self.scale or 1)


@pytest.mark.parametrize(
    ("forward", "name", "before", "after"),
    [
        (upcast_or_not, "upcast", True, False),
        (in_float32_or_not, "fp32", False, True),
        (doubled_in_a_mode, "mode", "none", "double"),
        (to_a_dtype, "out", None, torch.float32),
        (scaled, "scale", None, 2.0),
    ],
)
def test_attributes_set_after_the_patch(forward, name, before, after):
    module = make(forward, **{name: before})
    same(module, x_of(3, N, dtype=HALF), change=lambda m: (setattr(m, name, after), m.to(HALF)))


def test_a_parameter_added_after_the_patch():
    same(nn.LayerNorm(N, bias=False), x_of(3, N), change=lambda m: setattr(m, "bias", nn.Parameter(torch.ones(N))))
    same(nn.RMSNorm(N, elementwise_affine=False), x_of(3, N),
         change=lambda m: setattr(m, "weight", nn.Parameter(torch.full((N,), 2.0))))  # fmt: skip


def of_contiguous_input(self, x):
    return self.weight * hat(x.contiguous()).to(x.dtype)


def weightless(self, x):
    return F.layer_norm(x.float(), x.shape[-1:], None, None, self.eps).to(x.dtype)


def weightless_times_one(self, x):
    return F.layer_norm(x.float(), x.shape[-1:], None, None, self.eps).to(x.dtype) * 1


@pytest.mark.parametrize("forward", [of_contiguous_input, weightless, weightless_times_one])
def test_an_output_that_is_always_contiguous(forward):
    module, x = make(forward), x_of(2, 4, 5, N).transpose(1, 2)
    original = copy.deepcopy(module)
    patch_model(module)
    for backend in ("reference", "triton"):
        with use_backend(backend):
            assert module(x).stride() == original(x).stride()


def of_images(self, x):
    y = F.layer_norm(x.permute(0, 2, 3, 1), self.shape, self.weight, None, self.eps)
    return y.permute(0, 3, 1, 2).contiguous()


def test_an_image_norm_that_ends_contiguous():
    same(make(of_images, shape=(N,)), x_of(2, N, 3, 5))


def test_a_one_dimensional_input_that_gains_a_dimension():
    def forward(self, x):
        x = x[None] if x.dim() == 1 else x
        return self.weight * hat(x)

    same(make(forward), x_of(N))


def test_an_optional_second_input_that_is_no_gate_is_said():
    def forward(self, x, residual=None):
        return self.weight * hat(x if residual is None else x + residual)

    module = make(forward)
    (record,) = report_on(module).swapped
    assert "calls that give 'residual' run its own forward" in record.notes
    same(make(forward), x_of(3, N), x_of(3, N))


def test_a_gate_that_must_be_given_and_comes_before_the_norm():
    def forward(self, x, gate):
        return self.weight * hat(x.float() * F.silu(gate.float()), self.eps).to(x.dtype)

    (record,) = report_on(make(forward)).swapped
    assert record.formula.gate == "silu_before" and record.formula.eps == 1e-6
    same(make(forward), x_of(3, N, dtype=HALF), x_of(3, N, dtype=HALF))


def test_a_gate_of_another_kind_is_named():
    def forward(self, x, gate):
        return self.weight * hat(x) * gate

    (record,) = report_on(make(forward)).skipped
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
