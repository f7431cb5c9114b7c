"""What the launches of queries and keys take: their share of the programs, and strides
as they come.
"""

import pytest

from hf_rmsnorm import use_backend
from hf_rmsnorm.kernels.qk_launch import QKForward, shares
from hf_rmsnorm.kernels.sizes import QK_PROGRAMS_PER_SM, qk_config, qk_stages
from tests.unit.kernels.test_norm_forward import assert_equal, contiguous
from tests.unit.kernels.test_qk_forward import QWEN3, attention, gradients_like

parametrize = pytest.mark.parametrize

SHARES = [  # tiles of q and of k, programs, programs of each
    ([3, 5], 8, (3, 5)),
    ([3, 4], 8, (3, 4)),
    ([6, 3], 8, (5, 3)),
    ([100, 1], 8, (7, 1)),
    ([1, 100], 8, (1, 7)),
    ([32, 8], 8, (6, 2)),
    ([2, 2], 2, (1, 1)),
    ([1, 0], 8, (1, 0)),
    ([100, 0], 8, (8, 0)),
]


@parametrize("tiles, programs, expected", SHARES)
def test_programs_are_shared_in_proportion_and_none_is_left_out(
    tiles, programs, expected
):
    assert shares(tiles, programs) == expected


STAGES = [  # bytes of an element, bytes of shared memory, stages
    (2, 232_448, 3),
    (4, 232_448, 2),
    (2, 101_376, 2),
    (2, 65_536, 1),
    (4, 135_168, 2),
    (4, 135_164, 1),
]


@parametrize("itemsize, shared, stages", STAGES)
def test_as_many_stages_as_let_all_programs_fit(itemsize, shared, stages):
    assert qk_stages(itemsize, shared) == stages
    if stages > 1:
        tile = qk_config(128)
        operand = tile.rows * tile.block * itemsize
        ahead = (stages - 1) * 4 * operand  # x, dy, cos and sin
        of_program = ahead + 1_024
        assert QK_PROGRAMS_PER_SM * of_program <= shared


SHAPES = [
    (1, 2, 3, 16),
    (2, 2, 1, 16),
    (1, 2, 1, 16),
]


def odd(t):
    """The same with another stride where a dimension has one element."""
    strides = list(t.stride())
    for dimension, size in enumerate(t.shape):
        if size == 1:
            strides[dimension] = 5
    return t.as_strided(t.shape, strides)


@parametrize("shape", SHAPES)
def test_a_dimension_of_one_element_may_have_any_stride(shape):
    """It is not read, and does not decide on vectors."""
    made = attention((contiguous, contiguous), shape)
    dys = gradients_like(made)
    with use_backend("triton"):
        outputs = made.forward()
        gradients = made.gradients(dys)
        made.q = odd(made.q)
        made.k = odd(made.k)
        made.tables = [odd(t) for t in made.tables]
        assert_equal(made.forward(), outputs)
        assert_equal(made.gradients([odd(dy) for dy in dys]), gradients)
    operands = (*made.operands, *made.tables)
    launch = QKForward(operands, (made.q, made.k), True, spec=QWEN3)
    assert launch.kernel.aligned
