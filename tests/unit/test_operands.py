"""Operands are where the kernels and the launches expect them."""

import pytest

from hf_rmsnorm.kernels.norm_launch import NORM_BACKWARD, NORM_FORWARD
from hf_rmsnorm.kernels.qk_launch import QK_NORM_BACKWARD, QK_NORM_FORWARD
from hf_rmsnorm.operands import (
    GradientOperands,
    HeadOperands,
    NormOperands,
    NormResults,
    of_modulation,
    of_norm,
    of_rotation,
    of_sum,
)

# those that the kernels do not call by the same name
POINTERS = {
    "weight": "W",
    "bias": "B",
    "gate": "G",
    "residual": "RES",
    "q_weight": "WQ",
    "k_weight": "WK",
}
IN_ORDER = [
    (NORM_FORWARD, (*NormOperands._fields, *NormResults._fields)),
    (NORM_BACKWARD, GradientOperands._fields),
    (QK_NORM_FORWARD, HeadOperands._fields),
    (QK_NORM_BACKWARD, ("dyq", "dyk", *HeadOperands._fields)),
]


@pytest.mark.parametrize("kernel, names", IN_ORDER)
def test_operands_have_the_order_of_a_kernels_pointers(kernel, names):
    pointers = [POINTERS.get(name, name.upper()) for name in names]
    assert kernel.pointers[: len(pointers)] == pointers


MADE = [
    (NormOperands, of_norm, ("x", "weight", "bias", "gate")),
    (
        NormOperands,
        of_modulation,
        ("x", "weight", "bias", "scale", "shift", "multiplier", "residual"),
    ),
    (HeadOperands, of_rotation, ("q", "k", "cos", "sin")),
]


@pytest.mark.parametrize("named, make, names", MADE)
def test_each_operand_is_made_in_its_place(named, make, names):
    made = named(*make(*names))._asdict()
    assert made == dict.fromkeys(made) | {name: name for name in names}


def test_the_residual_of_a_sum_is_its_left_summand():
    made = NormOperands(*of_sum("left", "right", "weight", "bias"))
    assert (made.x, made.residual) == ("right", "left")
    assert (made.weight, made.bias) == ("weight", "bias")
