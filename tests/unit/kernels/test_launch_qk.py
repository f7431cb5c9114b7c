"""What the launches of queries and keys take: their share of the programs, and strides
as they come.
"""

import pytest
import torch
from heads import fused_qk_norm

from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.kernels.sizes import QK_PROGRAMS_PER_SM, qk_config, qk_stages
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.reference import reference_qk_norm

pytestmark = pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
if device_refusal("cpu") is None:
    from hf_rmsnorm.kernels.launch_qk import QKForward, shares

RMS = NormSpec(False, 1e-2, rounding="before_weight")


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "tiles, programs, expected",
    [
        ([3, 5], 8, (3, 5)),
        ([3, 4], 8, (3, 4)),
        ([6, 3], 8, (5, 3)),
        ([8, 1], 8, (7, 1)),
        ([100, 1], 8, (7, 1)),
        ([1, 100], 8, (1, 7)),
        ([32, 8], 8, (6, 2)),
        ([2, 2], 2, (1, 1)),
        ([1, 0], 8, (1, 0)),
        ([100, 0], 8, (8, 0)),
    ],
)
def test_programs_are_shared_in_proportion_and_none_is_left_out(
    tiles, programs, expected
):
    assert shares(tiles, programs) == expected


@pytest.mark.parametrize(
    "itemsize, shared, stages",
    [
        (2, 232_448, 3),
        (4, 232_448, 2),
        (2, 101_376, 2),
        (2, 65_536, 1),
        (4, 4 * (1_024 + 4 * 2_048 * 4), 2),
        (4, 4 * (1_024 + 4 * 2_048 * 4) - 4, 1),
    ],
)
def test_as_many_stages_as_let_all_programs_fit(itemsize, shared, stages):
    assert qk_stages(itemsize, shared) == stages
    tile = qk_config(128)
    buffer = 4 * tile.rows * tile.block * itemsize  # x, dy, cos and sin
    assert stages == 1 or QK_PROGRAMS_PER_SM * ((stages - 1) * buffer + 1_024) <= shared


def gradients(function, operands, tables, dys):
    leaves = [t.detach().requires_grad_() for t in operands]
    outputs = function(*leaves, RMS, *tables)
    return *outputs, *torch.autograd.grad(outputs, leaves, dys)


@pytest.mark.parametrize("columns", [20, 21])
@pytest.mark.parametrize("turned", [20, 12])
@pytest.mark.parametrize("gap", [0, 4])
def test_columns_and_strides_that_no_vector_divides(gap, turned, columns):
    def heads(count, seed):
        return rows(2, count, 3, columns + gap, seed=seed)[..., :columns]

    tables = rows(1, 3, turned, seed=3), rows(1, 3, turned, seed=4)
    operands = (
        heads(4, 0),
        heads(2, 1),
        rows(columns) + 2.0,
        rows(columns, seed=2) + 2.0,
    )
    dys = heads(4, 5), heads(2, 6)
    ours = gradients(fused_qk_norm, operands, tables, dys)
    theirs = gradients(reference_qk_norm, operands, tables, dys)
    for got, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "batch, length, heads", [(1, 3, 2), (2, 1, 2), (2, 3, 1), (1, 1, 1)]
)
def test_a_dimension_of_one_element_may_have_any_stride(batch, length, heads):
    """It is not read, and does not decide on vectors."""
    q = rows(batch, heads, length, 16, seed=0)
    k = rows(batch, heads, length, 16, seed=1)
    tables = rows(1, length, 16, seed=2), rows(1, length, 16, seed=3)

    def odd(t):
        strides = list(t.stride())
        for dimension, size in enumerate(t.shape):
            if size == 1:
                strides[dimension] = 5
        return t.as_strided(t.shape, strides)

    weights = rows(16) + 2.0, rows(16, seed=4) + 2.0
    operands = odd(q), odd(k), *weights, *map(odd, tables)
    assert QKForward(RMS, operands, True).start.aligned
    dys = (
        odd(rows(batch, heads, length, 16, seed=5)),
        odd(rows(batch, heads, length, 16, seed=6)),
    )
    ours = gradients(
        fused_qk_norm, (odd(q), odd(k), *weights), [odd(t) for t in tables], dys
    )
    theirs = gradients(reference_qk_norm, (q, k, *weights), tables, dys)
    for got, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
