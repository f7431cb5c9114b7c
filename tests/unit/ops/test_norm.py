"""The norm as a function: the choice of backend, autocast, statistics and parameters."""

import pytest
import torch
import torch.nn.functional as F
from add_norm import fused_add_norm
from computed import compute_norm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rmsnorm import NormSpec, count_launches, layer_norm, rms_norm, use_backend
from tests.unit.ops.test_operators import DEVICE, random

BF16 = torch.bfloat16

FP32 = torch.float32


def test_use_backend_leaves_nothing_behind():
    weight = torch.ones(64, device=DEVICE)
    x = random(4, 64)
    for name in ("auto", "reference", "triton"):
        with use_backend(name), count_launches() as launches:
            rms_norm(x, weight)
        assert bool(launches) == (name != "reference")
        with count_launches() as launches:
            rms_norm(x, weight)
        assert launches.total() == 1


def test_backward_uses_the_backend_of_its_forward():
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    with use_backend("triton"):
        y = rms_norm(random(4, 64), weight)
    with use_backend("reference"), count_launches() as launches:
        y.sum().backward()
    assert launches["norm_backward"] == 1


@pytest.fixture
def autocast_of_cuda():
    """As on a GPU: seen through fake CUDA tensors."""
    enabled = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    with FakeTensorMode(), use_backend("triton"):
        yield
    torch.set_autocast_enabled("cuda", enabled)


def test_the_reference_of_a_functional_norm_without_parameters():
    x = torch.randn(3, 8)
    expected = F.layer_norm(x, (8,))
    with use_backend("reference"):
        assert torch.equal(layer_norm(x), expected)


def test_an_accelerators_autocast_computes_functional_norms_in_float32(
    autocast_of_cuda,
):
    """F.layer_norm is on autocast's float32 list there, the spelled-out norms not."""
    x = torch.empty(2, 8, dtype=BF16, device="cuda")
    weight = torch.empty(8, device="cuda", dtype=BF16)
    expected = F.layer_norm(x, (8,), weight)
    assert expected.dtype == FP32
    assert layer_norm(x, weight).dtype == FP32
    assert rms_norm(x, weight).dtype == BF16
    functional = NormSpec(False, 1e-6, functional=True)
    y = compute_norm(x, weight, None, functional)
    expected = F.rms_norm(x, (8,), weight)
    assert y.dtype == expected.dtype  # by torch's version


def test_an_accelerators_autocast_takes_a_sum_and_a_functional_norm_apart(
    autocast_of_cuda,
):
    """F.layer_norm returns float32 there, while the stream stays as it is."""
    layer = NormSpec(True, 1e-5, has_bias=True, functional=True)
    x = torch.empty(2, 8, dtype=BF16, device="cuda")
    weight = torch.empty(8, dtype=BF16, device="cuda")
    for operand in (x, x.float()):
        h, y = fused_add_norm(operand, operand, weight, weight, layer)
        assert h.dtype == operand.dtype
        assert y.dtype == FP32


class Made(TorchDispatchMode):
    """The shapes of what a call makes empty."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "empty" in str(func):
            self.shapes.append(made.shape)
        return made


@pytest.mark.parametrize("which", [None, 0, 1, 2, 3])
def test_statistics_are_made_for_a_backward_alone(which):
    x = random(3, 64)
    gate = random(3, 64)
    weight = random(64)
    bias = random(64)
    spec = NormSpec(True, 1e-6, has_bias=True, gate="silu_after")
    operands = [x, weight, bias, gate]
    if which is not None:
        operands[which].requires_grad_()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), use_backend("triton"), Made() as made:
            y = compute_norm(x, weight, bias, spec, gate=gate)
        statistics = 0
        if enabled and which is not None:
            statistics = 2
        assert y.requires_grad == bool(statistics)
        assert made.shapes.count((3,)) == statistics
