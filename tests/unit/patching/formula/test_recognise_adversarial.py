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
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(size))
        self.eps = 1e-6


def hat(x, eps=1e-6):
    h = x.float()
    variance = h.pow(2).mean(-1, keepdim=True)
    return h * torch.rsqrt(variance + eps)


def make(forward, **attributes):
    module = type("Thing", (Base,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def unchanged(module):
    pass


def same(module, *inputs, change=unchanged):
    """The patched module gives the bits, dtype and strides of the unpatched one,
    changed in the same way.
    """
    original = copy.deepcopy(module)
    report = patch_model(module)
    assert report.swapped
    change(module)
    change(original)
    expected = original(*inputs)
    with use_backend("reference"):
        y = module(*inputs)
    assert y.dtype == expected.dtype
    assert y.stride() == expected.stride()
    assert torch.equal(y, expected)


def x_of(*shape, dtype=torch.float32):
    torch.manual_seed(3)
    values = torch.randn(*shape) * 1.5 + 0.2
    return values.to(dtype)


HALF = torch.bfloat16


def to_the_gates_dtype(self, x, gate):
    y = self.weight * hat(x)
    y = y * F.silu(gate.float())
    return y.to(gate.dtype)


def test_a_norm_that_gates_another_dtype_otherwise_is_left_alone():
    (record,) = report_on(make(to_the_gates_dtype)).skipped
    assert "rounds to half precision in an order of its own" in record.reason


def with_bias(self, x):
    y = hat(x).to(x.dtype)
    return self.weight * y + self.bias


def test_a_bias_of_another_dtype_than_the_weight():
    module = make(with_bias, bias=nn.Parameter(torch.rand(N)))

    def change(m):
        m.weight.data = m.weight.data.to(HALF)

    same(module, x_of(3, N, dtype=HALF), change=change)


def in_four_groups(self, x):
    groups = x.float().unflatten(-1, (4, -1))
    y = hat(groups)
    return y.flatten(-2).to(x.dtype)


@pytest.mark.parametrize("size", [32, 128])
def test_rows_of_another_length_than_it_was_asked_with(size):
    module = type("Thing", (nn.Module,), {"forward": in_four_groups})()
    same(module, x_of(4, size))


def squeezed(self, x):
    return (self.weight * hat(x)).squeeze()


def squeezed_behind_rows(self, x):
    return (self.weight * hat(x)).squeeze(1)


@pytest.mark.parametrize("forward", [squeezed, squeezed_behind_rows])
def test_a_norm_that_drops_dimensions_is_left_alone(forward):
    (record,) = report_on(make(forward)).skipped
    assert "does not return one tensor of its input's shape" in record.reason


def of_contiguous_input(self, x):
    y = hat(x.contiguous())
    return self.weight * y.to(x.dtype)


def test_an_output_that_is_always_contiguous():
    module = make(of_contiguous_input)
    x = x_of(2, 4, 5, N).transpose(1, 2)
    expected = module(x)
    patch_model(module)
    for backend in ("reference", "triton"):
        with use_backend(backend):
            y = module(x)
        assert y.stride() == expected.stride()


def test_an_optional_second_input_that_is_no_gate_is_said():
    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
        return self.weight * hat(x)

    (record,) = report_on(make(forward)).skipped
    assert "its second input, 'residual', is no gate" in record.reason


def test_a_gate_of_another_kind_is_named():
    def forward(self, x, gate):
        return self.weight * hat(x) * gate

    (record,) = report_on(make(forward)).skipped
    assert "'gate', is no gate that this package knows" in record.reason


def in_its_inputs_dtype(self, x):
    y = F.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)
    return y.to(x.dtype)


def test_a_cast_that_autocast_does_not_undo_is_left_to_the_module():
    (record,) = report_on(make(in_its_inputs_dtype)).swapped
    assert "under autocast it runs its own forward" in record.notes


def test_a_gate_that_is_left_out_changes_the_dtype():
    def forward(self, x, gate=None):
        h = hat(x, self.eps).to(x.dtype)
        if gate is None:
            return self.weight.to(x.dtype) * h
        return (self.weight * h * F.silu(gate.float())).to(x.dtype)

    assert not report_on(make(forward)).swapped
