"""Norms of model code outside of Transformers are swapped, and have its bits in every
regime of autocast: off, in bfloat16, in float16.
"""

import contextlib

import pytest
import remote_norms
import torch
from reports import report_on
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from hf_rmsnorm import count_launches, use_backend

# of the older functions of torch that such code calls
pytestmark = pytest.mark.filterwarnings("ignore:.*autocast.*deprecated")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OWN = "under autocast it runs its own forward"
CLASSES = (*remote_norms.ALL, NemotronLayerNorm1P)
CAST_THEMSELVES = (*remote_norms.CAST_THEMSELVES, NemotronLayerNorm1P)


def made(cls):
    norm = cls(remote_norms.SIZE) if cls is NemotronLayerNorm1P else cls()
    torch.manual_seed(0)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm.requires_grad_(False)


@contextlib.contextmanager
def autocast(dtype):
    """Of the CPU, and what a norm hears of CUDA's where it asks without naming a type."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before)
    try:
        with torch.autocast("cpu", dtype or BF16, enabled=dtype is not None):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_norm_of_other_code_has_its_bits_in_every_regime(cls):
    norm = made(cls)
    (record,) = report_on(norm).swapped
    casts = cls in CAST_THEMSELVES
    assert (OWN in record.notes) == casts
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, remote_norms.SIZE, generator=generator)
    for dtype in (FP32, BF16, FP16):
        x = rows.to(dtype)
        norm.to(dtype)
        for regime in (None, BF16, FP16):
            with autocast(regime):
                expected = cls.forward(norm, x)
                with use_backend("reference"):
                    y = norm(x)
                with count_launches() as launches:
                    norm(x)
            torch.testing.assert_close(y, expected, rtol=2e-7, atol=2e-7)
            runs_own = casts and regime is not None
            assert launches.total() == (not runs_own), (dtype, regime)


def test_autocast_of_another_device_counts_for_a_norm_that_asks_without_naming_one():
    norm = made(remote_norms.MptLPLayerNorm)
    assert report_on(norm).swapped
    x = torch.randn(6, remote_norms.SIZE)
    torch.set_autocast_enabled("cuda", True)
    try:
        assert norm(x).dtype == torch.get_autocast_dtype("cpu")
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert norm(x).dtype == FP32


def test_a_flag_that_its_forward_asks_for_and_is_set_later_is_obeyed():
    norm = made(remote_norms.TimmLayerNorm)
    assert report_on(norm).swapped
    norm._fast_norm = True
    x = torch.randn(6, remote_norms.SIZE)
    with torch.autocast("cpu", BF16):
        assert norm(x).dtype == BF16
