"""What is compiled rounds where Hugging Face rounds: no product goes into a sum before
its rounding.
"""

import re

import pytest
import torch
from heads import fused_qk_norm
from probes import facts

from hf_rmsnorm import use_backend
from hf_rmsnorm.ops import fused_norm
from hf_rmsnorm.reference import reference_norm, reference_qk_norm
from tests.unit.kernels.test_kernels import (
    SPECS,
    check,
    last_dimension_strided,
    parameters,
    rows,
    unaligned,
)

BF16, FP16 = torch.bfloat16, torch.float16
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
SHARE = 0.999  # of bits that must be eager's: its sums are added in another order
pytestmark = pytest.mark.usefixtures("driver")


def contiguous(shape, dtype, seed):
    return rows(*shape, dtype=dtype, seed=seed)


def share(ours, eager):
    return (ours == eager).double().mean().item()


@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ROUNDING)
def test_norms_have_the_bits_of_eager(name, dtype):
    weight, bias = parameters(SPECS[name], 96, dtype)
    for x in (rows(64, 96, dtype=dtype), unaligned((2, 8, 4, 96), dtype, 1)):
        with torch.no_grad(), use_backend("triton"):
            fused = fused_norm(x, weight, bias, SPECS[name])
        assert share(fused, reference_norm(x, weight, bias, SPECS[name])) >= SHARE


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("layout", [contiguous, unaligned])
@pytest.mark.parametrize("turned", [128, pytest.param(64, marks=pytest.mark.full)])
def test_queries_and_keys_have_the_bits_of_eager(turned, layout, dtype):
    q, k = layout((2, 4, 9, 128), dtype, 0), layout((2, 2, 9, 128), dtype, 1)
    q_weight, _ = parameters(SPECS["llama"], 128, dtype, 2)
    k_weight, _ = parameters(SPECS["llama"], 128, dtype, 3)
    angles = torch.arange(9)[:, None] * torch.exp(-torch.arange(turned // 2) / 7.0)
    angles = torch.cat([angles, angles], -1)[None]
    operands = q, k, q_weight, k_weight, SPECS["llama"]
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    with torch.no_grad(), use_backend("triton"):
        fused = fused_qk_norm(*operands, *tables)
        expected = reference_qk_norm(*operands, *tables)
    assert share(fused[0], expected[0]) >= SHARE
    assert share(fused[1], expected[1]) >= SHARE


@pytest.mark.parametrize("hidden_size", [1, 2, 3, 7, 24, 33])
@pytest.mark.parametrize("layout", [unaligned, last_dimension_strided])
def test_threads_agree_on_the_sums_of_short_rows(layout, hidden_size):
    """Where they did not, each would write its own last bits to one place, which the
    executor reports as a race.
    """
    spec = SPECS["layer_norm"]
    weight, bias = parameters(spec, hidden_size, BF16)
    x = layout((2, 3, 5, hidden_size), BF16, 0).requires_grad_()
    with use_backend("triton"):
        y = fused_norm(x, weight, bias, spec)
        torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))


@pytest.mark.parametrize("name", APPROXIMATE)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_an_ulp_of_the_approximate_instructions_is_within_the_tolerance(
    driver, name, dtype
):
    spec = SPECS[name]
    weight, bias = parameters(spec, 96, dtype)
    driver.machine.blurred = True
    check(
        spec, rows(64, 96, dtype=dtype), weight, bias, rows(64, 96, dtype=dtype, seed=7)
    )


def test_nothing_is_left_for_the_assembler_to_contract(driver):
    """A mul and an add without a rounding of their own may become one instruction
    behind our back.
    """
    driver.launches = []
    test_threads_agree_on_the_sums_of_short_rows(unaligned, 24)
    test_queries_and_keys_have_the_bits_of_eager(128, unaligned, BF16)
    texts = {kernel.name: kernel.text for kernel, *_ in driver.launches}
    chip = driver.get_current_target().arch
    assert {"norm_forward", "norm_backward", "qk_norm_forward"} <= texts.keys()
    for name, text in texts.items():
        assert f".target sm_{chip}" in text
        assert not re.search(r"\b(mul|add|sub)\.(ftz\.)?(b?f16|f32)", text), name
        assert "forward" not in name or "fma." not in text


@pytest.mark.full
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("sm_75", marks=pytest.mark.nightly),
        "sm_80",
        "sm_90",
        "sm_100",
        "gfx942",
    ],
)
def test_forwards_hold_no_fused_multiply_add_on_either_maker(target):
    fused = facts("contraction_probe.py", target)
    assert len(fused) == 4 and not any(map(any, fused.values())), fused
