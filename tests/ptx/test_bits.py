"""What is compiled rounds where Hugging Face rounds: no product goes into a sum before
its rounding.
"""

import re

import pytest
import torch
from computed import compute_norm
from probes import facts, links_for_amd

from hf_rmsnorm import use_backend
from hf_rmsnorm.reference import reference_norm
from tests.unit.kernels.test_norm_forward import (
    BF16,
    FP16,
    FP32,
    SPECS,
    check,
    contiguous,
    last_dimension_strided,
    parameters,
    rows,
    transposed,
    unaligned,
)
from tests.unit.kernels.test_qk_forward import attention
from tests.unit.kernels.test_qk_forward_rotary import test_any_strides

pytestmark = pytest.mark.usefixtures("driver")
parametrize = pytest.mark.parametrize

ROUNDING = [
    "llama",
    "rms_bias",
    "layer_norm_then_affine",
    "t5",
    "gemma",
    "layer_norm",
    "rounded_rstd_weight",
]
APPROXIMATE = [
    "llama",
    "layer_norm",
    "textbook_layer_norm",
    "silu_before",
    "silu_after",
]


def assert_bits_of_eager(y, expected):
    """But for those that adding in another order changes."""
    same = y == expected
    assert same.double().mean() >= 0.999


@parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.full)])
@parametrize("name", ROUNDING)
def test_norms_have_the_bits_of_eager(name, dtype):
    spec = SPECS[name]
    weight, bias = parameters(spec, 96, dtype)
    aligned_rows = rows(64, 96, dtype=dtype)
    unaligned_rows = unaligned((2, 8, 4, 96), dtype, 1)
    for x in (aligned_rows, unaligned_rows):
        with torch.no_grad(), use_backend("triton"):
            fused = compute_norm(x, weight, bias, spec)
        assert_bits_of_eager(fused, reference_norm(x, weight, bias, spec))


@parametrize("dtype", [BF16, FP16])
@parametrize("layout", [contiguous, unaligned])
@parametrize("turned", [128, pytest.param(64, marks=pytest.mark.full)])
def test_queries_and_keys_have_the_bits_of_eager(turned, layout, dtype):
    dtypes = (dtype, dtype, dtype)
    made = attention((layout, layout), (2, 4, 9, 128), dtypes, turned)
    with use_backend("triton"):
        fused = made.forward()
    with use_backend("reference"):
        expected = made.forward()
    for y, of_eager in zip(fused, expected, strict=True):
        assert_bits_of_eager(y, of_eager)


@parametrize("hidden_size", [1, 2, 3, 7, 24, 33])
@parametrize("layout", [unaligned, last_dimension_strided])
def test_threads_agree_on_the_sums_of_short_rows(layout, hidden_size):
    """Where they did not, each would write its own last bits to one place, which the
    executor reports as a race.
    """
    spec = SPECS["layer_norm"]
    weight, bias = parameters(spec, hidden_size, BF16)
    x = layout((2, 3, 5, hidden_size), BF16, 0).requires_grad_()
    with use_backend("triton"):
        y = compute_norm(x, weight, bias, spec)
        torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))


@parametrize("name", APPROXIMATE)
@parametrize("dtype", [FP32, BF16])
def test_an_ulp_of_the_approximate_instructions_is_within_the_tolerance(
    driver, name, dtype
):
    spec = SPECS[name]
    weight, bias = parameters(spec, 96, dtype)
    x = rows(64, 96, dtype=dtype)
    dy = rows(64, 96, dtype=dtype, seed=7)
    driver.machine.blurred = True
    check(spec, x, weight, bias, dy)


def test_nothing_is_left_for_the_assembler_to_contract(driver):
    """A mul and an add without a rounding of their own may become one instruction
    behind our back.
    """
    driver.launches = []
    test_threads_agree_on_the_sums_of_short_rows(unaligned, 24)
    test_queries_and_keys_have_the_bits_of_eager(128, unaligned, BF16)
    test_any_strides(unaligned, transposed)
    texts = [(kernel.name, kernel.text) for kernel, *_ in driver.launches]
    chip = driver.get_current_target().arch
    assert {"norm_forward", "norm_backward", "qk_norm_forward"} <= dict(texts).keys()
    for name, text in texts:
        assert f".target sm_{chip}" in text
        assert not re.search(r"\b(mul|add|sub)\.(ftz\.)?(b?f16|f32)", text), name
        if "forward" in name:  # and a rotation's backward, of the same kernel
            assert "fma." not in text


TARGETS = [
    pytest.param("sm_75", marks=pytest.mark.full),
    "sm_80",
    "sm_90",
    "sm_100",
    pytest.param(
        "gfx942",
        marks=pytest.mark.skipif(not links_for_amd(), reason="no linker for AMD"),
    ),
]


@pytest.mark.full
@parametrize("target", TARGETS)
def test_forwards_hold_no_fused_multiply_add_on_either_maker(target):
    fused = facts("contraction_probe.py", target)
    assert len(fused) == 6
    for contracted in fused.values():
        assert not any(contracted)
