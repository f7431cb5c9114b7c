"""Kernels read and write what is theirs: beside every operand lies NaN, and behind
every output what must stay.
"""

import pytest
import torch
from add_norm import fused_add_norm
from heads import fused_qk_norm

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.reference import reference_norm, reference_qk_norm

pytestmark = pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
if device_refusal("cpu") is None:
    from hf_rmsnorm.kernels import launch, launch_backward, launch_qk

MARGIN, KEPT = 4_096, 12_345.0
RMS = NormSpec(False, 1e-2, rounding="before_weight")
BIASED = NormSpec(True, 1e-2, has_bias=True)
OUTSIDE = NormSpec(False, 0.5, rounding="before_weight", eps_outside=True)
AFTER = NormSpec(False, 1e-2, gate="silu_after")
BEFORE = NormSpec(False, 1e-2, gate="silu_before")


class Margins:
    """torch, where what is made empty lies between margins that must stay as they are."""

    def __init__(self):
        self.made = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty_strided(self, shape, strides, *, dtype, device=None):
        if device is not None and torch.device(device).type == "meta":
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        size = 0
        if 0 not in shape:
            size = 1
            for n, stride in zip(shape, strides, strict=True):
                size += (n - 1) * stride
        whole = torch.full((size + 2 * MARGIN,), KEPT, dtype=dtype)
        self.made.append((whole, size))
        return whole.as_strided(shape, strides, MARGIN)

    def empty_like(self, t, **options):
        like = torch.empty_like(t, **options)
        if like.is_meta:
            return like
        return self.empty_strided(like.shape, like.stride(), dtype=like.dtype)

    def empty(self, *shape, **options):
        like = torch.empty(*shape, **options)
        if like.is_meta:
            return like
        return self.empty_strided(like.shape, like.stride(), dtype=like.dtype)

    def assert_kept(self):
        assert self.made
        for whole, size in self.made:
            kept = torch.tensor(KEPT, dtype=whole.dtype)
            assert whole[:MARGIN].eq(kept).all()
            assert whole[MARGIN + size :].eq(kept).all()


@pytest.fixture
def margins(monkeypatch):
    margins = Margins()
    for module in (launch, launch_backward, launch_qk):
        monkeypatch.setattr(module, "torch", margins)
    return margins


def operand(*shape, seed=0):
    """Random numbers with NaN on both sides of each row."""
    generator = torch.Generator().manual_seed(seed)
    *outer, columns = shape
    whole = torch.full((*outer, columns + 64), torch.nan)
    inner = whole[..., 32:-32]
    return inner.copy_(torch.randn(shape, generator=generator))


def parameter(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(shape, generator=generator)
    whole = torch.full((values.numel() + 2 * MARGIN,), torch.nan)
    inner = whole[MARGIN:-MARGIN].view(shape)
    return inner.copy_(values + 0.5)


def compare(ours, theirs, operands, margins):
    def run(function):
        leaves = [t.detach().requires_grad_() for t in operands]
        outputs = function(*leaves)
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        dys = []
        for i, y in enumerate(outputs):
            dys.append(operand(*y.shape, seed=9 + i))
        return *outputs, *torch.autograd.grad(outputs, leaves, dys)

    for got, right in zip(run(ours), run(theirs), strict=True):
        assert not got.isnan().any()
        torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-4)
    margins.assert_kept()


SIZES = [(5, 9), (5, 64), (3, 520), (5, 1_024), (3, 2_056), (2, 8_200), (3, 16_376)]
NORMS = {"rms": (RMS, False), "layer norm": (BIASED, True), "outside": (OUTSIDE, False)}


CASES = [(name, *size) for name in NORMS for size in SIZES]


@pytest.mark.parametrize("name, rows, columns", CASES)
def test_norms(name, rows, columns, margins):
    spec, has_bias = NORMS[name]
    operands = (
        operand(rows, columns),
        parameter(columns),
        *([parameter(columns, seed=1)] if has_bias else []),
    )
    compare(
        lambda x, w, b=None: fused_norm(x, w, b, spec),
        lambda x, w, b=None: reference_norm(x, w, b, spec),
        operands,
        margins,
    )


@pytest.mark.parametrize("columns", [9, 520, 8_200, 16_376])
def test_sums(columns, margins):
    def plain(x, residual, w, b):
        h = residual + x
        return h, reference_norm(h, w, b, BIASED)

    operands = (
        operand(3, columns),
        operand(3, columns, seed=1),
        parameter(columns),
        parameter(columns, seed=2),
    )
    compare(
        lambda x, r, w, b: fused_add_norm(x, r, w, b, BIASED), plain, operands, margins
    )


@pytest.mark.parametrize("columns", [9, 520, 8_200])
@pytest.mark.parametrize("spec", [AFTER, BEFORE])
def test_gates(spec, columns, margins):
    operands = operand(3, columns), parameter(columns), operand(3, columns, seed=1)
    compare(
        lambda x, w, g: fused_norm(x, w, None, spec, gate=g),
        lambda x, w, g: reference_norm(x, w, None, spec, g),
        operands,
        margins,
    )


@pytest.mark.parametrize("columns", [9, 64, 1_032])
def test_weights_of_heads(columns, margins):
    operands = (
        operand(5, 3, columns),
        parameter(3, columns),
        parameter(3, columns, seed=1),
    )
    compare(
        lambda x, w, b: fused_norm(x, w, b, BIASED),
        lambda x, w, b: reference_norm(x, w, b, BIASED),
        operands,
        margins,
    )


@pytest.mark.parametrize(
    "head_dim, turned", [(10, 10), (10, 6), (16, 16), (80, 80), (80, 32)]
)
def test_queries_and_keys(head_dim, turned, margins):
    tables = operand(1, 3, turned, seed=3), operand(1, 3, turned, seed=4)
    operands = (
        operand(1, 3, 3, head_dim),
        operand(1, 2, 3, head_dim, seed=1),
        parameter(head_dim),
        parameter(head_dim),
    )
    compare(
        lambda *t: fused_qk_norm(*t, RMS, *tables),
        lambda *t: reference_qk_norm(*t, RMS, *tables),
        operands,
        margins,
    )


@pytest.mark.parametrize("columns", [40, 520, 16_376])
@pytest.mark.parametrize("name", ["rms", "layer norm"])
def test_from_the_output(name, columns, margins):
    spec, has_bias = NORMS[name]
    operands = (
        operand(3, columns),
        parameter(columns),
        *([parameter(columns, seed=1)] if has_bias else []),
    )
    compare(
        lambda x, w, b=None: fused_norm(x, w, b, spec, keep_output=True),
        lambda x, w, b=None: reference_norm(x, w, b, spec),
        operands,
        margins,
    )
