"""The norm as an operator: eager, groups, Inductor, the choice of backend, autocast and
strides of its output.
"""

import shutil

import pytest
import torch
import torch.nn.functional as F
from add_norm import fused_add_norm
from tolerance import assert_as_accurate
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import NormSpec, count_launches, layer_norm, rms_norm, use_backend
from hf_rmsnorm.ops import backend, fused_norm, norm

BF16, FP32 = torch.bfloat16, torch.float32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["triton", "reference"]


class Block(nn.Module):
    """Both norms around a linear, as a decoder layer has them."""

    def __init__(self, hidden_size=64):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.rand(hidden_size, generator=generator) + 0.5)
        self.bias = nn.Parameter(torch.randn(hidden_size, generator=generator))
        self.mix = nn.Parameter(
            torch.randn(hidden_size, hidden_size, generator=generator)
            / hidden_size**0.5
        )

    def forward(self, x):
        return layer_norm(rms_norm(x, self.weight) @ self.mix, self.weight, self.bias)


class EagerBlock(Block):
    def forward(self, x):
        llama = LlamaRMSNorm(x.shape[-1])
        llama.weight = self.weight
        return F.layer_norm(llama(x) @ self.mix, x.shape[-1:], self.weight, self.bias)


@pytest.fixture
def block():
    return Block().to(DEVICE)


def some_input(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values.to(DEVICE)


def outcome(function, block, x):
    """Output and every gradient of a scalar loss."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


def assert_policy(got, block, x):
    eager = EagerBlock()
    eager.load_state_dict(block.state_dict())
    eager.to(x.device)
    expected = outcome(eager, eager, x)
    exact_block = Block().double().to(x.device)
    exact_block.load_state_dict({k: v.double() for k, v in block.state_dict().items()})
    with use_backend("reference"):
        exact = outcome(exact_block, exact_block, x.double())
    for name, a, b, c in zip(
        ("y", "dx", "dweight", "dbias", "dmix"), got, expected, exact, strict=True
    ):
        assert_as_accurate(a, b, c, name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(16, 64), (2, 8, 64), (2, 2, 4, 64)])
def test_eager(block, backend, shape):
    x = some_input(*shape)
    with use_backend(backend):
        assert_policy(outcome(block, block, x), block, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_of_a_norm_in_groups(backend):
    torch._dynamo.reset()
    spec = NormSpec(False, 1e-6, group_size=16)
    x = some_input(4, 64)
    weight = some_input(64)
    compiled = torch.compile(
        lambda t: fused_norm(t, weight, None, spec), fullgraph=True, backend="aot_eager"
    )
    with use_backend(backend):
        assert torch.equal(compiled(x), fused_norm(x, weight, None, spec))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_inductor(block, backend):
    if (
        DEVICE == "cpu"
        and shutil.which("g++") is None
        and shutil.which("clang++") is None
    ):
        pytest.skip("Inductor needs a C++ compiler for the CPU, and there is none")
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True)
    x = some_input(2, 8, 64)
    with use_backend(backend):
        for a, b in zip(
            outcome(compiled, block, x), outcome(block, block, x), strict=True
        ):
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item()
            )


def test_use_backend_leaves_nothing_behind():
    weight = torch.ones(64, device=DEVICE)
    x = some_input(4, 64)
    for name, count in (("auto", 1), ("reference", 0), ("triton", 1), ("auto", 1)):
        with use_backend(name), count_launches() as launches:
            rms_norm(x, weight)
        assert launches.total() == count
        with count_launches() as launches:
            rms_norm(x, weight)
        assert launches.total() == 1


def test_backward_uses_the_backend_of_its_forward():
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    with use_backend("triton"):
        y = rms_norm(some_input(4, 64), weight)
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
    with use_backend("reference"):
        assert torch.equal(layer_norm(x), F.layer_norm(x, (8,)))


def test_an_accelerators_autocast_computes_functional_norms_in_float32(
    autocast_of_cuda,
):
    """F.layer_norm is on autocast's float32 list there, the spelled-out norms not."""
    x = torch.empty(2, 8, dtype=BF16, device="cuda")
    weight = torch.empty(8, device="cuda", dtype=BF16)
    assert layer_norm(x, weight).dtype == F.layer_norm(x, (8,), weight).dtype == FP32
    assert rms_norm(x, weight).dtype == BF16
    functional = NormSpec(False, 1e-6, functional=True)
    # by torch's version
    assert (
        fused_norm(x, weight, None, functional).dtype
        == F.rms_norm(x, (8,), weight).dtype
    )


def test_an_accelerators_autocast_takes_a_sum_and_a_functional_norm_apart(
    autocast_of_cuda,
):
    """F.layer_norm returns float32 there, while the stream stays as it is."""
    layer = NormSpec(True, 1e-5, has_bias=True, functional=True)
    x = torch.empty(2, 8, dtype=BF16, device="cuda")
    weight = torch.empty(8, dtype=BF16, device="cuda")
    for operand in (x, x.float()):
        h, y = fused_add_norm(operand, operand, weight, weight, layer)
        assert (h.dtype, y.dtype) == (operand.dtype, FP32)


class Made(TorchDispatchMode):
    """The shapes and dtypes of what a call makes empty."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func._overloadpacket in (
            torch.ops.aten.empty,
            torch.ops.aten.empty_like,
            torch.ops.aten.empty_strided,
        ):
            self.found.append((tuple(made.shape), made.dtype))
        return made


@pytest.mark.parametrize("which", [None, 0, 1, 2, 3])
def test_statistics_are_made_for_a_backward_alone(which):
    operands = [some_input(3, 64), some_input(64), some_input(64), some_input(3, 64)]
    spec = NormSpec(True, 1e-6, has_bias=True, gate="silu_after")
    if which is not None:
        operands[which].requires_grad_()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), use_backend("triton"), Made() as made:
            y = fused_norm(*operands[:3], spec, gate=operands[3])
        assert y.requires_grad == (grad and which is not None)
        on_device = [each for each in made.found if each[0] == (3,)]
        assert len(on_device) == (2 if y.requires_grad else 0), made.found


@pytest.mark.parametrize("strided", ["weight", "bias", "both"])
@pytest.mark.parametrize("has_weight", [True, False])
def test_parameters_with_gaps(strided, has_weight):
    x = some_input(3, 64)
    weight = some_input(64)
    bias = some_input(64, seed=4)
    gaps = torch.stack([weight, bias], 1)
    given = (
        gaps[:, 0] if strided != "bias" else weight,
        gaps[:, 1] if strided != "weight" else bias,
    )
    given, plain = (
        (given, (weight, bias)) if has_weight else ((None, given[1]), (None, bias))
    )
    spec = NormSpec(False, 1e-6, has_weight=has_weight, has_bias=True)
    with use_backend("triton"):
        assert torch.equal(fused_norm(x, *given, spec), fused_norm(x, *plain, spec))
        residual = some_input(3, 64, seed=5)
        for a, b in zip(
            *(fused_add_norm(x, residual, *each, spec) for each in (given, plain)),
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("function", [rms_norm, layer_norm])
def test_a_column_more_or_less_is_no_matter_of_rows(function):
    assert function(torch.ones(0, 4)).shape == (0, 4)
    assert function(torch.ones(1)).shape == (1,)
    with pytest.raises(ValueError, match="must hold at least one element"):
        function(torch.ones(2, 0))


def test_a_functional_norm_under_a_devices_autocast(monkeypatch):
    """On accelerators these compute in float32: here autocast of an accelerator is what
    the CPU says it is.
    """
    floats = some_input(3, 64), some_input(64), some_input(64, seed=4)
    half = [t.bfloat16() for t in floats]
    spec = NormSpec(True, 1e-6, has_bias=True, functional=True)
    with use_backend("triton"):
        expected = fused_norm(*(t.float() for t in half), spec)
        assert fused_norm(*half, spec).dtype == BF16
        monkeypatch.setattr(norm, "autocasts_functional", lambda *of: True)
        y = fused_norm(*half, spec)
    assert y.dtype == FP32
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "device_type, enabled, casts",
    [("cpu", True, False), ("cuda", True, True), ("cuda", False, False)],
)
def test_which_autocast_computes_functional_norms_in_float32(
    device_type, enabled, casts, monkeypatch
):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda of: enabled)
    assert (
        backend.autocasts_functional(NormSpec(True, 1e-6, functional=True), device_type)
        == casts
    )
    for listed in (True, False):
        # torch 2.12 put F.rms_norm on the list, where F.layer_norm was
        monkeypatch.setattr(backend, "_lists_rms_norm", listed)
        assert backend.autocasts_functional(
            NormSpec(False, 1e-6, functional=True), device_type
        ) == (casts and listed)
