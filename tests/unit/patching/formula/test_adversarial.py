"""Modules made to be mistaken: what a hostile reader found, each with the result of the
module itself.
"""

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
    """The patched module gives the bits, dtype and strides of the unpatched one,
    changed in the same way.
    """
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
    assert (
        y.dtype == expected.dtype
        and y.stride() == expected.stride()
        and torch.equal(y, expected)
    )


def x_of(*shape, dtype=torch.float32):
    torch.manual_seed(3)
    return (torch.randn(*shape) * 1.5 + 0.2).to(dtype)


HALF = torch.bfloat16


def to_the_gates_dtype(self, x, gate):
    return (self.weight * hat(x) * F.silu(gate.float())).to(gate.dtype)


def torch_norm(self, x, gate):
    return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps) * F.silu(gate)


@pytest.mark.parametrize(
    "x_dtype, gate_dtype", [(HALF, torch.float32), (torch.float32, HALF), (HALF, HALF)]
)
@pytest.mark.parametrize("forward", [to_the_gates_dtype, torch_norm])
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
    return (
        (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6))
        .flatten(-2)
        .to(x.dtype)
    )


@pytest.mark.parametrize("size", [32, 128])
def test_rows_of_another_length_than_it_was_asked_with(size):
    module = type("Thing", (nn.Module,), {"forward": in_four_groups})()
    same(module, x_of(4, size))


def test_a_parameter_added_after_the_patch():
    same(
        nn.LayerNorm(N, bias=False),
        x_of(3, N),
        change=lambda m: setattr(m, "bias", nn.Parameter(torch.ones(N))),
    )
    same(nn.RMSNorm(N, elementwise_affine=False), x_of(3, N),
         change=lambda m: setattr(m, "weight", nn.Parameter(torch.full((N,), 2.0))))  # fmt: skip


def of_contiguous_input(self, x):
    return self.weight * hat(x.contiguous()).to(x.dtype)


def test_an_output_that_is_always_contiguous():
    module, x = make(of_contiguous_input), x_of(2, 4, 5, N).transpose(1, 2)
    original = copy.deepcopy(module)
    patch_model(module)
    for backend in ("reference", "triton"):
        with use_backend(backend):
            assert module(x).stride() == original(x).stride()


def test_an_optional_second_input_that_is_no_gate_is_said():
    def forward(self, x, residual=None):
        return self.weight * hat(x if residual is None else x + residual)

    module = make(forward)
    (record,) = report_on(module).swapped
    assert "calls that give 'residual' run its own forward" in record.notes
    same(make(forward), x_of(3, N), x_of(3, N))


def test_a_gate_of_another_kind_is_named():
    def forward(self, x, gate):
        return self.weight * hat(x) * gate

    (record,) = report_on(make(forward)).skipped
    assert "'gate', is no gate that this package knows" in record.reason


def in_its_inputs_dtype(self, x):
    return F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps).to(x.dtype)


def test_a_cast_that_autocast_does_not_undo_is_left_to_the_module():
    (record,) = report_on(make(in_its_inputs_dtype)).swapped
    assert "under autocast it runs its own forward" in record.notes
